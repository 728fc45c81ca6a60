"""A container without an engine: a file system and a network of its own, in which a Dockerfile's commands run as written.

System and interpreter are the host's, bound read-only; Weir's locked dependencies come out of the test's own
environment, so that nothing is fetched. There is no way out of it but loopback.
"""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
DEVICES = ("null", "zero", "urandom", "random")
ACCOUNTS = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "group": "root:x:0:\n",
    "shadow": "root:*:1::::::\n",
    "gshadow": "root:*::\n",
}
LOOPBACK_UP = (
    "import fcntl, socket, struct, sys\n"
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14s', b'lo', 1, b''))  # SIOCSIFFLAGS, IFF_UP\n"
)
PATH = "/image/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SECONDS = 120


def can_unshare(*kinds: str) -> bool:
    """Whether this machine lets the test have namespaces of its own."""
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, *kinds, "true"], capture_output=True, check=False).returncode == 0


def dockerfile(text: str) -> list[tuple[str, str]]:
    """(instruction, what it says), continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


@dataclass
class Image:
    """What the instructions of a Dockerfile have made of ``root``."""

    root: Path
    context: Path
    holder: int
    folder: str = "/"
    user: str = "root"
    env: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def inside(self, command: Sequence[str], env: Mapping[str, str] = {}) -> list[str]:
        """The host's command that runs another one in the image, with nothing but the image's environment and ``env``."""
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        words = [f"{k}={v}" for k, v in {"PATH": PATH, "HOME": home, **self.env, **env}.items()]
        enter = ["nsenter", "--target", str(self.holder), "--mount", "--net", "chroot", f"--userspec={self.user}"]
        script = f"cd {shlex.quote(self.folder)} && exec {shlex.join(command)}"
        return [*enter, str(self.root), "/usr/bin/env", "-i", *words, "/bin/sh", "-c", script]

    def run(self, command: Sequence[str], env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(self.inside(command, env), capture_output=True, text=True, timeout=SECONDS, check=False)

    def build(self, instructions: Sequence[tuple[str, str]]) -> None:
        """Does what a Dockerfile says."""
        for name, said in instructions:
            if name == "RUN":
                done = self.run(["/bin/sh", "-c", said], {"PIP_NO_INDEX": "1"})
                assert done.returncode == 0, f"RUN {said}: {done.stdout}{done.stderr}"
            elif name == "COPY":
                *sources, target = said.split()
                for source in sources:
                    self._copy(self.context / source, target)
            elif name == "WORKDIR":
                self.folder = said
                (self.root / said.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif name == "ENV":
                self.env |= dict(word.split("=", 1) for word in shlex.split(said))
            elif name == "USER":
                self.user = said
            elif name in {"ENTRYPOINT", "CMD"}:
                setattr(self, {"ENTRYPOINT": "entrypoint", "CMD": "command"}[name], json.loads(said))
            elif name == "HEALTHCHECK":
                self.health = json.loads(said.removeprefix("CMD "))
            else:
                assert name in {"FROM", "VOLUME", "EXPOSE"}, f"the test does not know {name}"

    def _copy(self, source: Path, target: str) -> None:
        there = self.root / self.folder.lstrip("/") / target
        if source.is_dir():
            shutil.copytree(source, there, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, there)


@contextlib.contextmanager
def bare_root(root: Path, context: Path) -> Iterator[Image]:
    """An image that is nothing yet but a system with Python, ``python`` and ``pip`` on its PATH, and a running namespace."""
    script = LOOPBACK_UP + "print('up', flush=True); sys.stdin.read()"
    unshared = ["unshare", "--mount", "--net", "--propagation", "private"]
    holder = subprocess.Popen(
        [*unshared, "sh", "-ec", f'{_mounts(root)}\nexec "$0" -c "$1"', sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        up = holder.stdout.readline()
        assert up == b"up\n", holder.stderr.read()
        image = Image(root, context, holder.pid)
        _python(image)
        yield image
    finally:
        holder.stdin.close()
        holder.wait(30)
        holder.stdout.close()
        holder.stderr.close()


def _mounts(root: Path) -> str:
    """Makes the tree of ``root``; the commands that bind the host's system into it."""
    root.chmod(0o755)
    binds: list[tuple[Path, bool]] = []
    for each in (Path("/", name) for name in SYSTEM):
        if each.is_symlink():
            (root / each.name).symlink_to(each.readlink())
        elif each.is_dir():
            binds.append((each, True))
    for outside in (Path(sys.base_prefix), Path(sysconfig.get_path("purelib"))):
        if not outside.is_relative_to("/usr"):
            binds.append((outside, True))
    binds.append((Path("/proc"), True))
    binds += [(Path("/dev", name), False) for name in DEVICES]
    for each, is_folder in binds:
        inside = root / str(each).lstrip("/")
        inside.mkdir(parents=True, exist_ok=True) if is_folder else inside.parent.mkdir(exist_ok=True)
        if not is_folder:
            inside.touch()
    for name in ("tmp", "etc", "root", "home"):
        (root / name).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for name, text in ACCOUNTS.items():
        (root / "etc" / name).write_text(text)
    shutil.copy("/etc/ld.so.cache", root / "etc")
    return "\n".join(_bound(each, root / str(each).lstrip("/"), is_folder=is_folder) for each, is_folder in binds)


def _bound(source: Path, target: Path, *, is_folder: bool) -> str:
    there = shlex.quote(str(target))
    bound = f"mount --rbind {shlex.quote(str(source))} {there}"
    return f"{bound}\nmount -o remount,bind,ro {there}" if is_folder and source != Path("/proc") else bound


def _python(image: Image) -> None:
    """``python`` and ``pip`` in /image, which see the dependencies that the lock names."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    done = image.run([str(Path(sys.base_prefix, "bin", version)), "-m", "venv", "--without-pip", "/image"])
    assert done.returncode == 0, done.stderr
    site = image.root / "image" / "lib" / version / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = image.root / "image" / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec /image/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
