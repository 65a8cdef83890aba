"""Imitate a container engine for tests: run a command with the image's files, as the image's user.

The root contains the files that docker/Dockerfile copies, its virtual environment, and this
machine's system folders. Nothing else of this machine is visible, and none of it is writable.
Volumes and /tmp are set by the owner of the container. Uses a mount namespace and `chroot`, so it
needs root; processes and network are shared with the machine.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.services import ROOT

__all__ = ["IMAGE_ENVIRONMENT", "Container", "missing"]

_DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
_BUILD, _RUN = _DOCKERFILE.split("\nFROM ")[1:]
_BIN = "/opt/local/bin"
"""Folder of the image's scripts, which replaces its /usr/local/bin: /usr is mounted read-only."""
_OUTER_PATH = f"{_BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SYSTEM = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/dev", "/proc", "/sys")

_START = r"""
set -e
root=$1; shift
mount -t tmpfs -o mode=755 tmpfs "$root"
mkdir "$root/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"  # before the rest, which may be in /tmp
at() { # SOURCE PLACE ro|rw: what the container sees at PLACE
  if [ -d "$1" ]; then mkdir -p "$root$2"
  else mkdir -p "$(dirname "$root$2")"; [ -e "$root$2" ] || : >"$root$2"; fi
  mount --rbind "$1" "$root$2"
  [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
}
while [ "$1" != -- ]; do at "$1" "$2" "$3"; shift 3; done
shift
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid="$USER_ID" --regid="$USER_ID" --clear-groups \
  --no-new-privs --bounding-set=-all --inh-caps=-all env -u USER_ID --chdir=/opt/packhouse "$@"
"""


def _image_environment() -> dict[str, str]:
    (lines,) = re.findall(r"^ENV (.*)$", _RUN, re.MULTILINE)
    found = dict(word.split("=", 1) for word in shlex.split(lines))
    found["PATH"] = found["PATH"].replace("$PATH", _OUTER_PATH)
    return found


IMAGE_ENVIRONMENT = _image_environment()
"""ENV of the image."""


def missing() -> str | None:
    """Return why no container can be started here, or None if one can."""
    if shutil.which("docker-compose") is None:
        return "no docker-compose here: apt-get install docker-compose"
    if os.geteuid() != 0:
        return "mounts of a container's own need root"
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        return "no mount namespace can be made here"
    return None


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container before it starts."""

    command: list[str]
    """Arguments after the image's entrypoint."""
    environment: Mapping[str, str]
    """Variables added to the image's environment."""
    user: int
    volumes: Mapping[str, tuple[Path, str]]
    """Path in the container -> what is mounted there, and `ro` or `rw`."""

    def start(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Return the process to start, and its environment.

        Args:
            folder: an empty folder on which the container's root is mounted.
        """
        folder.mkdir(parents=True)
        users = folder.with_suffix(".passwd")
        home = IMAGE_ENVIRONMENT["HOME"]
        line = f"packhouse:x:{self.user}:{self.user}::{home}:/usr/sbin/nologin\n"
        users.write_text(Path("/etc/passwd").read_text() + line)
        at = {place: (Path(place), "rw" if place == "/dev" else "ro") for place in _SYSTEM}
        python = Path(sys.prefix).resolve()  # the first lines of its programs name this path
        for place in (sys.base_prefix, str(python), "/opt/packhouse/venv"):
            at[place] = (python if place.endswith("/venv") else Path(place), "ro")
        at["/etc/passwd"] = (users, "ro")
        (anonymous,) = re.findall(r"^VOLUME (.*)$", _RUN, re.MULTILINE)
        if anonymous not in self.volumes:  # an engine creates one, owned as in the image
            volume = folder.with_suffix(".volume")
            volume.mkdir()
            os.chown(volume, self.user, self.user)
            at[anonymous] = (volume, "rw")
        at |= {place: (source, "ro") for place, source in _copied().items()} | self.volumes
        mounts = [word for place, (source, mode) in at.items() for word in (source, place, mode)]
        (entrypoint,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', _RUN, re.MULTILINE)
        script = ["unshare", "--mount", "sh", "-c", _START, "container", folder, *mounts, "--"]
        command = [*script, entrypoint, *self.command]
        ids = {"USER_ID": str(self.user)}
        return [str(word) for word in command], {**IMAGE_ENVIRONMENT, **self.environment, **ids}


def _copied() -> dict[str, Path]:
    """Return the files that the image copies: path in the image -> file or folder here."""
    found = {}
    for folder, lines in (("/opt/packhouse/", _BUILD), ("/", _RUN)):
        for line in re.findall(r"^COPY (?!--from)(.*)$", lines, re.MULTILINE):
            *sources, place = [word for word in line.split() if not word.startswith("--")]
            for source in sources:
                to = f"{folder}{source}" if place == "./" else str(Path(folder) / place)
                found[to.replace("/usr/local/bin", _BIN)] = ROOT / source
    return found
