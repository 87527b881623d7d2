"""Instructions that a program can check, as IFEval has them (Zhou et al., 2023): 25 kinds, pure functions of a text."""
