"""What users start: each module holds one command's function, which takes configured objects and knows no gin."""
