"""Commands of the program, one folder each: flags (`command`), function (`run`) and their parts.

`run` takes configured objects and does not import gin.
"""
