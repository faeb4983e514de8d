"""What `server_image/Dockerfile` copies is enough to install art-cloud from, `launch/` included."""

from __future__ import annotations

import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "server_image" / "Dockerfile"
SOURCE = "/opt/art/src"
"""Where the image has the files that art-cloud is installed from."""
LAUNCH = {
    *("server.lock.txt", "server-vllm.lock.txt", "ssh/prepare.py", "ssh/servers.py"),
    *("modal/app.py", "skypilot/bridge.py", "skypilot/reach.sh", "skypilot/server.yaml"),
}
FIND = """
from art_cloud.clusters.install import LAUNCH, lock
from art_cloud.clusters.providers import local
assert lock("vllm").is_file() and lock("transformers").is_file()
assert local._program().__file__ == str(LAUNCH / "ssh" / "servers.py")
print(*(path.relative_to(LAUNCH).as_posix() for path in LAUNCH.rglob("*") if path.is_file()))
"""


def _instructions() -> list[list[str]]:
    """The lines of the Dockerfile, continued ones as one, each in words."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


def _sent() -> list[Path]:
    """The files of the checkout that a build gets, after its ignore file."""
    patterns = Path(f"{DOCKERFILE}.dockerignore").read_text().split()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = [Path(name) for name in listed.stdout.split("\0") if name]
    return [path for path in paths if (ROOT / path).exists() and _is_sent(path, patterns)]


def _is_sent(path: Path, patterns: list[str]) -> bool:
    sent = True
    for pattern in patterns:
        wanted = pattern.removeprefix("!").replace("**/", "*")
        if any(fnmatch.fnmatch(str(above), wanted) for above in (path, *path.parents)):
            sent = pattern.startswith("!")
    return sent


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with what the COPY lines of the Dockerfile place in the image, and nothing else."""
    context, image = tmp_path / "context", tmp_path / "image"
    for path in _sent():
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, context / path, follow_symlinks=False)
    for words in _instructions():
        if words[0] == "COPY":
            *sources, target = [word for word in words[1:] if not word.startswith("--")]
            _copy([context / source for source in sources], image, target)
    return image


def _copy(sources: list[Path], image: Path, target: str) -> None:
    """What COPY does: a folder's content goes to the target, a file into it if it ends with /."""
    there = image / target.lstrip("/")
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, there, symlinks=True, dirs_exist_ok=True)
        else:
            file = there / source.name if target.endswith("/") else there
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, file)


def test_the_dockerfile_copies_what_its_installation_needs(image: Path, tmp_path: Path) -> None:
    [install] = [words for words in _instructions() if f"{SOURCE}[server]" in words]
    constraint = install[install.index("--constraint") + 1]
    assert (image / constraint.lstrip("/")).read_text().startswith("# art-cloud[server]")

    uv = shutil.which("uv", path=Path(sys.executable).parent) or "uv"
    built = subprocess.run(
        [uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path, image / SOURCE[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr

    [wheel] = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    assert {path.name for path in installed.iterdir() if not path.suffix} == {
        *("art_cloud", "art_server")
    }
    found = subprocess.run(
        [sys.executable, "-c", FIND],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert set(found.stdout.split()) >= LAUNCH


def test_a_checkout_finds_its_own_scripts() -> None:
    """An editable installation runs the files of the checkout, not copies of them."""
    from art_cloud.clusters.install import LAUNCH as found
    from art_cloud.clusters.providers import local

    assert found == ROOT / "launch"
    assert local._program().__file__ == str(found / "ssh" / "servers.py")
    assert not (ROOT / "art_cloud" / "launch").exists()


def test_a_copy_of_a_folder_is_what_other_machines_install(image: Path, tmp_path: Path) -> None:
    """Until the folder changes: they would run something else then."""
    folder, installed = image / SOURCE[1:], tmp_path / "installed"
    uv = shutil.which("uv", path=Path(sys.executable).parent) or "uv"
    there = ["--python", sys.executable, "--target", str(installed)]
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", *there, folder], check=True)

    def source() -> subprocess.CompletedProcess[str]:
        program = "from art_cloud.clusters.install import source; print(source().wheel)"
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": str(installed), "ART_CLOUD_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
        )

    made = source()
    assert made.returncode == 0, made.stderr
    assert "art_cloud/launch/ssh/prepare.py" in zipfile.ZipFile(made.stdout.strip()).namelist()
    with (folder / "art_cloud" / "shared" / "names.py").open("a") as file:
        file.write("# changed\n")
    assert f"pip install --editable {folder}" in source().stderr


def test_without_uv_pip_builds_it(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from art_cloud.clusters import install as wheel

    monkeypatch.setattr(wheel.shutil, "which", lambda name, path=None: None)
    wheel._build(image / SOURCE[1:], image / "wheels")
    assert [path.suffix for path in (image / "wheels").iterdir()] == [".whl"]
