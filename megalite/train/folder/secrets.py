"""Keeps secrets out of the record of a start, by the names of variables and by what values look like."""

import re
from collections.abc import Iterable, Mapping

VARIABLES = ("CUDA_", "NCCL_", "TORCH", "OMP_", "SLURM_", "MASTER_", "GLOO_", "TRITON_", "PYTORCH_")
MASK = "***"
SECRETS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH", "JWT", "COOKIE")  # in names; SLURM_JWT is one
HARMLESS_WORDS = re.compile(r"TOKENIZERS?|TOKENS")
PASSWORD = re.compile(r"PWD?(?![A-Z])")  # as in DB_PW and MYSQL_PWD
FOLDERS = ("PWD", "OLDPWD")  # the shell's, which are no passwords
SETTING = re.compile(r"""(?<!\w)([A-Za-z_][\w.-]{0,99})["']?\s{0,3}[=:](?!//)""")  # NAME= or NAME:, no URL
NEXT_SETTING = re.compile(r"[,;&\s]+[A-Za-z_-][\w.-]{0,99}=")  # the beginning of another one
FLAG = re.compile(r"((?<!\S)--?([A-Za-z][\w-]{0,99})\s+)(?!-)\S+")
USER = re.compile(r"([A-Za-z][\w+.-]{0,19}://)[^\s/?#]{0,999}@|(?<![\w/])[^\s:@/,=]{1,99}:[^\s@/]{1,99}@(?=\w)")
TOKEN_FORMATS = re.compile(  # tokens in the formats of well-known services
    r"(?<![A-Za-z0-9])(hf_\w{8,}|gh[a-z]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|sk-[\w-]{8,}|xox[a-z]-[\w-]{8,}"
    r"|A[KS]IA[0-9A-Z]{8,}|AIza[\w-]{8,}|ya29\.[\w-]{8,}|(npm|dckr_pat|wandb_v\d)_[\w-]{8,}|pypi-[\w-]{8,}"
    r"|eyJ[\w-]{6,}\.[\w-]+\.[\w-]*|(Bearer|Basic)\s+\S+|(?<![/\w])[0-9a-f]{40}(?![/\w])"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY.*)",
    re.DOTALL,
)


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that decide how a job runs, without secrets."""
    names = sorted(name for name in environment if name.startswith(VARIABLES) and not is_secret(name))
    return {name: without_secrets(environment[name]) for name in names}


def command_without_secrets(words: Iterable[str]) -> list[str]:
    """The words of a command, with `***` in place of secrets."""
    told: list[str] = []
    hidden = False  # the word, by the option before it
    for word in words:
        told.append(MASK if hidden and not word.startswith("-") else without_secrets(word))
        hidden = word.startswith("-") and "=" not in word and is_secret(word)
    return told


def without_secrets(value: str) -> str:
    """A value with `***` in place of passwords and keys: in lists of NAME=VALUE, in URLs, and of known forms."""

    told = FLAG.sub(lambda found: found[1] + MASK if is_secret(found[2]) else found[0], value)
    told = USER.sub(lambda found: f"{found[1] or ''}{MASK}@", told)
    parts, at = [], 0
    while found := SETTING.search(told, at):
        parts.append(told[at : found.end()])
        at = found.end()
        if is_secret(found[1]):  # its value may have any character, so it ends where another one begins
            after = NEXT_SETTING.search(told, at)
            at = after.start() if after else len(told)
            parts.append(MASK)
    return TOKEN_FORMATS.sub(MASK, "".join([*parts, told[at:]]))


def is_secret(name: str) -> bool:
    """Return whether a variable, an option or a key of this name holds a secret."""
    bare = HARMLESS_WORDS.sub("", name.upper())
    found = any(secret in bare for secret in SECRETS) or PASSWORD.search(bare) is not None
    return found and name not in FOLDERS
