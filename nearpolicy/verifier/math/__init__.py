"""Math answers: where in a completion the answer stands, what it says, and whether it equals the right one.

    completion --extraction--> answer --notation, grammar--> tree --equivalence--> equal or not, and by which rule
                                                               \\-- not our notation --> math-verify (`library`)

Everything but `library` takes time that the length of the answer bounds, and builds no code from text. `verdict` puts
the parts together. `docs/verify-math.md` lists the conventions.
"""
