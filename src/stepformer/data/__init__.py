"""Corpora: where documents come from, tokenizers, preparation, and the tokens of a prepared corpus."""

from typing import TYPE_CHECKING

from stepformer.base.aliases import lazy

if TYPE_CHECKING:  # `import stepformer` does not wait for them
    from stepformer.data.batches import Batches
    from stepformer.data.corpus import Corpus, TokenSplit, corpus_folder
    from stepformer.data.opening import open_source
    from stepformer.data.sources import Source
    from stepformer.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

__getattr__ = lazy(__name__)
__all__ = ["Batches", "Corpus", "Source", "TokenSplit", "Tokenizer"]
__all__ += ["corpus_folder", "load_tokenizer", "make_tokenizer", "open_source"]
