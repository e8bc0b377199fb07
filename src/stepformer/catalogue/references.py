"""BibTeX of everything the catalogue cites, so that `stepformer show NAME --cite` prints exactly what a model uses."""

from __future__ import annotations

BIBTEX: dict[str, str] = {}


def _add(key: str, kind: str, **fields: str) -> None:
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    BIBTEX[key] = "\n".join([f"@{kind}{{{key},", *lines, "}"])


_add(
    "zimin2026yuriiformer",
    "misc",
    author="Zimin, Aleksandr and Polyanskiy, Yury and Rigollet, Philippe",
    title="{YuriiFormer}: A Suite of {Nesterov}-Accelerated Transformers",
    year="2026",
    eprint="2601.23236",
    archivePrefix="arXiv",
)
_add(
    "gai2026momentum",
    "misc",
    author="Gai, Jingchu and Huang, Nai-Chieh and Wu, Jiayun",
    title="Momentum Streams for Optimizer-Inspired Transformers",
    year="2026",
    eprint="2605.24425",
    archivePrefix="arXiv",
)
_add(
    "geshkovski2025mathematical",
    "article",
    author="Geshkovski, Borjan and Letrouit, Cyril and Polyanskiy, Yury and Rigollet, Philippe",
    title="A Mathematical Perspective on Transformers",
    journal="Bulletin of the American Mathematical Society",
    volume="62",
    year="2025",
)
_add(
    "vaswani2017attention",
    "inproceedings",
    author="Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and "
    "Gomez, Aidan N. and Kaiser, Lukasz and Polosukhin, Illia",
    title="Attention Is All You Need",
    booktitle="NeurIPS",
    year="2017",
)
_add(
    "hendrycks2016gaussian",
    "misc",
    author="Hendrycks, Dan and Gimpel, Kevin",
    title="{Gaussian} Error Linear Units ({GELUs})",
    year="2016",
    eprint="1606.08415",
    archivePrefix="arXiv",
)
_add(
    "shazeer2020glu",
    "misc",
    author="Shazeer, Noam",
    title="{GLU} Variants Improve Transformer",
    year="2020",
    eprint="2002.05202",
    archivePrefix="arXiv",
)
_add(
    "polyak1964some",
    "article",
    author="Polyak, Boris T.",
    title="Some Methods of Speeding Up the Convergence of Iteration Methods",
    journal="USSR Computational Mathematics and Mathematical Physics",
    volume="4",
    number="5",
    pages="1--17",
    year="1964",
)
_add(
    "nesterov1983method",
    "article",
    author="Nesterov, Yurii",
    title="A Method for Solving the Convex Programming Problem with Convergence Rate {$O(1/k^2)$}",
    journal="Doklady Akademii Nauk SSSR",
    volume="269",
    pages="543--547",
    year="1983",
)
_add(
    "vanscoy2018fastest",
    "article",
    author="Van Scoy, Bryan and Freeman, Randy A. and Lynch, Kevin M.",
    title="The Fastest Known Globally Convergent First-Order Method for Minimizing Strongly Convex Functions",
    journal="IEEE Control Systems Letters",
    volume="2",
    number="1",
    pages="49--54",
    year="2018",
)
_add(
    "tieleman2012rmsprop",
    "misc",
    author="Tieleman, Tijmen and Hinton, Geoffrey",
    title="Lecture 6.5: {RMSProp}",
    howpublished="COURSERA: Neural Networks for Machine Learning",
    year="2012",
)
_add(
    "kingma2015adam",
    "inproceedings",
    author="Kingma, Diederik P. and Ba, Jimmy",
    title="{Adam}: A Method for Stochastic Optimization",
    booktitle="ICLR",
    year="2015",
)
_add(
    "loshchilov2019decoupled",
    "inproceedings",
    author="Loshchilov, Ilya and Hutter, Frank",
    title="Decoupled Weight Decay Regularization",
    booktitle="ICLR",
    year="2019",
)
_add(
    "jordan2024muon",
    "misc",
    author="Jordan, Keller and Jin, Yuchen and Boza, Vlado and You, Jiacheng and Cesista, Franz and "
    "Newhouse, Laker and Bernstein, Jeremy",
    title="{Muon}: An Optimizer for Hidden Layers in Neural Networks",
    year="2024",
)
_add(
    "gupta2018shampoo",
    "inproceedings",
    author="Gupta, Vineet and Koren, Tomer and Singer, Yoram",
    title="{Shampoo}: Preconditioned Stochastic Tensor Optimization",
    booktitle="ICML",
    year="2018",
)
_add(
    "vyas2025soap",
    "inproceedings",
    author="Vyas, Nikhil and Morwani, Depen and Zhao, Rosie and Kwun, Mujin and Shapira, Itai and "
    "Brandfonbrener, David and Janson, Lucas and Kakade, Sham",
    title="{SOAP}: Improving and Stabilizing {Shampoo} using {Adam}",
    booktitle="ICLR",
    year="2025",
)
_add(
    "lu2019understanding",
    "misc",
    author="Lu, Yiping and Li, Zhuohan and He, Di and Sun, Zhiqing and Dong, Bin and Qin, Tao and "
    "Wang, Liwei and Liu, Tie-Yan",
    title="Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View",
    year="2019",
    eprint="1906.02762",
    archivePrefix="arXiv",
)
_add(
    "chowdhery2023palm",
    "article",
    author="Chowdhery, Aakanksha and Narang, Sharan and Devlin, Jacob and others",
    title="{PaLM}: Scaling Language Modeling with Pathways",
    journal="Journal of Machine Learning Research",
    volume="24",
    number="240",
    pages="1--113",
    year="2023",
)
_add(
    "strang1968construction",
    "article",
    author="Strang, Gilbert",
    title="On the Construction and Comparison of Difference Schemes",
    journal="SIAM Journal on Numerical Analysis",
    volume="5",
    number="3",
    pages="506--517",
    year="1968",
)
_add(
    "verlet1967computer",
    "article",
    author="Verlet, Loup",
    title="Computer ``Experiments'' on Classical Fluids. {I}. Thermodynamical Properties of {Lennard-Jones} Molecules",
    journal="Physical Review",
    volume="159",
    pages="98--103",
    year="1967",
)
_add(
    "ascher1995implicit",
    "article",
    author="Ascher, Uri M. and Ruuth, Steven J. and Wetton, Brian T. R.",
    title="Implicit-Explicit Methods for Time-Dependent Partial Differential Equations",
    journal="SIAM Journal on Numerical Analysis",
    volume="32",
    number="3",
    pages="797--823",
    year="1995",
)
_add(
    "hairer2006geometric",
    "book",
    author="Hairer, Ernst and Lubich, Christian and Wanner, Gerhard",
    title="Geometric Numerical Integration",
    publisher="Springer",
    edition="2",
    year="2006",
)
_add(
    "ba2016layer",
    "misc",
    author="Ba, Jimmy Lei and Kiros, Jamie Ryan and Hinton, Geoffrey E.",
    title="Layer Normalization",
    year="2016",
    eprint="1607.06450",
    archivePrefix="arXiv",
)
_add(
    "zhang2019root",
    "inproceedings",
    author="Zhang, Biao and Sennrich, Rico",
    title="Root Mean Square Layer Normalization",
    booktitle="NeurIPS",
    year="2019",
)
_add(
    "su2024roformer",
    "article",
    author="Su, Jianlin and Ahmed, Murtadha and Lu, Yu and Pan, Shengfeng and Bo, Wen and Liu, Yunfeng",
    title="{RoFormer}: Enhanced Transformer with Rotary Position Embedding",
    journal="Neurocomputing",
    volume="568",
    year="2024",
)
_add(
    "stein2026sympformer",
    "misc",
    author="Stein, Viktor and Li, Wuchen and Steidl, Gabriele",
    title="{SympFormer}: Accelerated attention blocks via Inertial Dynamics on Density Manifolds",
    year="2026",
    eprint="2603.16535",
    archivePrefix="arXiv",
)
_add(
    "cox2002exponential",
    "article",
    author="Cox, Steven M. and Matthews, Paul C.",
    title="Exponential Time Differencing for Stiff Systems",
    journal="Journal of Computational Physics",
    volume="176",
    year="2002",
)
_add(
    "constrained-transformers",
    "misc",
    title="Transformers as Constrained Optimization",
    note="Post, CC BY 4.0; its text names no author and no year",
)
_add(
    "shortcuts",
    "misc",
    title="Efficient Training of Transformer Models Through Architectural Shortcuts and Optimized Momentum Scheduling",
    note="Manuscript; its text names no author and no year",
)
_add(
    "zhou2025value",
    "misc",
    author="Zhou, Zhanchao and Wu, Tianyi and Jiang, Zhiyun and Obeid, Fares and Lan, Zhenzhong",
    title="Value Residual Learning",
    year="2024",
    eprint="2410.17897",
    archivePrefix="arXiv",
)
_add(
    "gemma2024gemma",
    "misc",
    author="{Gemma Team}",
    title="Gemma 2: Improving Open Language Models at a Practical Size",
    year="2024",
    eprint="2408.00118",
    archivePrefix="arXiv",
)
_add(
    "henry2020query",
    "inproceedings",
    author="Henry, Alex and Dachapally, Prudhvi Raj and Pawar, Shubham and Chen, Yuxuan",
    title="Query-Key Normalization for Transformers",
    booktitle="Findings of EMNLP",
    year="2020",
)
