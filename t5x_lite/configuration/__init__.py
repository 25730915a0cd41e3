"""gin configurations: `syntax` reads files and flags, `binding` applies them, `checks` validates the result."""
