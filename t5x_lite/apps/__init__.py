"""The commands of the program. Each folder has its flags (`command`), its function (`run`), which takes configured
objects and knows no gin, and their parts."""
