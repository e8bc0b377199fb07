"""Rules that live outside the package: import a file or module, and what it registers has a name here too.

A plug-in is the content of its files: a run keeps a copy of them, to be read, and their SHA-256. A file that has
changed is another rule, and a run made with the old one is not opened with it. No run folder imports code by itself
(`stepformer.base.plugins.trusting`).
"""

from stepformer.base.plugins.identity import digest, identity, is_ours, remember, sources_of
from stepformer.base.plugins.loading import (
    comes_from_plugin,
    explained,
    import_file,
    lasting,
    load_plugin,
    load_plugins,
    load_recorded,
    loaded,
    refuse_changed,
)
from stepformer.base.plugins.sources import files_at, files_of, package_digest, place_of
from stepformer.base.plugins.trusting import UntrustedError, trust, trusted

__all__ = ["UntrustedError", "digest", "files_at", "files_of", "identity", "import_file", "lasting", "load_plugin"]
__all__ += ["comes_from_plugin", "explained", "is_ours", "load_plugins", "load_recorded", "loaded", "package_digest"]
__all__ += ["place_of", "refuse_changed", "remember", "sources_of", "trust", "trusted"]
