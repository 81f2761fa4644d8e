"""Packages of the wheel: every folder with Python files below five roots, which have shorter names in the checkout."""

from setuptools import find_packages, setup

ROOTS = {
    "megalite": "megalite",
    "megalite_kernels": "kernels",
    "megalite_launch": "launch",
    "megalite_presets": "configs",
    "megalite_tools": "tools",
}
inner = {root: [f"{root}.{found}" for found in find_packages(folder)] for root, folder in ROOTS.items()}
setup(packages=[*ROOTS, *(package for found in inner.values() for package in found)], package_dir=ROOTS)
