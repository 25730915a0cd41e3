"""Kit for the first run on a GPU: `make gpu` measures and checks everything that a CPU cannot, within nine minutes.

`__main__` has the command, `runner` starts the parts and writes their results, `worker` is the process of a part,
`lowering` compiles nothing but lowers the programs of all parts for CUDA on any machine. The other modules have the
items of the parts.
"""
