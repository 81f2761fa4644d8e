"""The commands of `megalite`, a module or a package for each; `main` reads the arguments and calls one."""
