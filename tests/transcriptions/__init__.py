"""Reference transcriptions, written from the mathematics alone, never from the implementation.

`rules` spells out every depth rule equation by equation with elementary tensor operations (`velocity`,
`preconditioned`, `hamiltonian`), with every attention (`attend`, `constrained`, `hamiltonian`) and every extra;
`rivals` the other ways to carry information through depth; `optimizers` and `trust_region` steps of parameters;
`plain_gpt` is an ordinary pre-norm GPT. The tests compare the library's outputs and gradients with both.
"""
