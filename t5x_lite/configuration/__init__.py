"""gin configurations: `syntax` reads files and flags, `binding` applies them, `checks` finds bindings without effect."""
