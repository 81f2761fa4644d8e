"""Prints, as pip's constraints, the lowest versions that pyproject.toml allows of what trains and prepares data.

Not of Hugging Face's packages, which demand versions of each other, nor of the tools of development.
"""

import re
import tomllib
from pathlib import Path

PINS = ("aiobotocore==2.13.0", "boto3==1.34.106")  # for that s3fs; pip would try hundreds

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["plot"], *extras["data"], *extras["s3"]]:
    lowest = re.match(r"([\w-]+)>=([\d.]+)", requirement)
    assert lowest, f"{requirement}: has no lowest version"
    print(f"{lowest[1]}=={lowest[2]}")
print(*PINS, sep="\n")
