"""gin configurations: `syntax` reads files and flags, `binding` resolves names, `validation` checks the values."""
