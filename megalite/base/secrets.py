"""Keeps secrets out of records, checkpoints, pages and trackers, by names of variables and by what values look like."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

VARIABLES = ("CUDA_", "NCCL_", "TORCH", "OMP_", "SLURM_", "MASTER_", "GLOO_", "TRITON_", "PYTORCH_")
MASK = "***"
SECRETS = (  # in names; SLURM_JWT is one
    *("KEY", "TOKEN", "SECRET", "PASS", "PWORD", "PSWD", "CRED", "AUTH", "JWT", "COOKIE", "SESSION"),
    *("SIGNATURE", "SALT", "WEBHOOK"),
)
HARMLESS_WORDS = re.compile(r"TOKENIZERS?")
COUNTED_WORD = "TOKENS"  # harmless where the value is a number
NUMBER = re.compile(r"""["']?\s*[\d._+-]+([eE][\d+-]+)?(?![^\s,;&"'])""")
PASSWORD = re.compile(r"PWD?(?![A-Z])|(?<![A-Z])(SIG|PIN)$")  # as in DB_PW and MYSQL_PWD, and sig= of signed URLs
FOLDERS = ("PWD", "OLDPWD")  # the shell's, which are no passwords
SETTING = re.compile(r"""(?<!\w)([A-Za-z_][\w.-]{0,99})["']?\s{0,3}[=:](?!//)""")  # NAME= or NAME:, no URL
NEXT_SETTING = re.compile(r"[,;&\s]+[A-Za-z_-][\w.-]{0,99}=")  # the beginning of another one
FLAG = re.compile(r"((?<!\S)--?([A-Za-z][\w-]{0,99})\s+)(?!-)(\S+)")
USER_FLAGS = ("u", "user", "proxy-user")  # curl's, with NAME:PASSWORD
USER = re.compile(  # with a password that may have / ? and #, which belong to no port
    r"([A-Za-z][\w+.-]{0,19}://)(?:[^\s/?#]{0,999}|[^\s/?#@:]{0,99}:(?!\d{1,5}[/?#])[^\s@]{1,999})@"
    r"|(?<![\w/])[^\s:@/,=]{1,99}:(?!/|\d{1,5}/)[^\s@,]{1,99}@(?=\w)"
)
TOKEN_FORMATS = re.compile(  # tokens in the formats of well-known services
    r"(?<![A-Za-z0-9])(hf_\w{8,}|gh[a-z]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|sk-[\w-]{8,}|xox[a-z]-[\w-]{8,}"
    r"|A[KS]IA[0-9A-Z]{8,}|AIza[\w-]{8,}|ya29\.[\w-]{8,}|(npm|dckr_pat|wandb_v\d)_[\w-]{8,}|pypi-[\w-]{8,}"
    r"|nvapi-[\w-]{8,}|rpa_\w{8,}|AGE-SECRET-KEY-\w+|(?<=hooks\.slack\.com/services/)\S+"
    r"|eyJ[\w-]{6,}\.[\w-]+\.[\w-]*|(Bearer|Basic)\s+\S+|(?<![/\w])([0-9a-f]{32}|[0-9a-f]{40})(?![/\w])"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY.*)",
    re.DOTALL,
)


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that decide how a job runs, without secrets."""
    kept = {name: value for name, value in sorted(environment.items()) if name.startswith(VARIABLES)}
    return {name: without_secrets(value) for name, value in kept.items() if not is_secret(name, value)}


def command_without_secrets(words: Iterable[str]) -> list[str]:
    """The words of a command, with `***` in place of secrets."""
    told: list[str] = []
    option = ""  # before the word
    for word in words:
        hidden = option and not word.startswith("-") and _is_hidden(option, word)
        told.append(MASK if hidden else without_secrets(word))
        option = word.lstrip("-") if word.startswith("-") and "=" not in word else ""
    return told


def without_secrets(value: str) -> str:
    """A value with `***` in place of passwords and keys: in lists of NAME=VALUE, in URLs, and of known forms."""

    told = FLAG.sub(lambda found: found[1] + MASK if _is_hidden(found[2], found[3]) else found[0], value)
    told = USER.sub(lambda found: f"{found[1] or ''}{MASK}@", told)
    parts, at = [], 0
    while found := SETTING.search(told, at):
        parts.append(told[at : found.end()])
        at = found.end()
        if is_secret(found[1], told[at : at + 100]):  # its value may have any character: it ends where another begins
            after = NEXT_SETTING.search(told, at)
            at = after.start() if after else len(told)
            parts.append(MASK)
    return TOKEN_FORMATS.sub(MASK, "".join([*parts, told[at:]]))


def text_without_secrets(text: str) -> str:
    """A text of many lines, each as `without_secrets` returns it."""
    return "\n".join(map(without_secrets, text.split("\n")))


def shareable(value: Any) -> Any:
    """Plain values of a configuration, with texts as `without_secrets` returns them: for checkpoints and trackers."""
    if isinstance(value, dict):
        return {name: shareable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable, an option or a key of this name holds a secret. value: its own, or how that begins."""
    bare = HARMLESS_WORDS.sub("", name.upper())
    if NUMBER.match(value):
        bare = bare.replace(COUNTED_WORD, "")
    found = any(secret in bare for secret in SECRETS) or PASSWORD.search(bare) is not None
    return found and name not in FOLDERS


def _is_hidden(option: str, value: str) -> bool:
    return is_secret(option, value) or (option in USER_FLAGS and ":" in value)
