# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels are kept: whom the folder must belong to, and what a damaged file does."""

import errno
import os
import pwd
import stat
from pathlib import Path

import numpy as np
import pytest

from command_line import run
from fp4kit.cpu import kernel_cache
from fp4kit.cpu.jit import jit_of
from fp4kit.cpu.kernel_cache import CACHE_VARIABLE, KernelFolder, kernel_folder
from fp4kit.errors import OptionError

NOBODY = 65534


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is known of any folder, and none is named."""
    kernel_cache._folder_below.cache_clear()
    monkeypatch.setattr(kernel_cache, "_given_up", {})
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    yield
    kernel_cache._folder_below.cache_clear()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder that FP4KIT_CACHE_DIR names."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def trusted():
    """The kernel folder, made now; asked for again it is looked at again."""
    folder = kernel_folder().path
    assert folder is not None, kernel_folder().reason
    kernel_cache._folder_below.cache_clear()
    return folder


# ------------------------------------------------------------------------------------------------
# Which folder
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["cache", "./cache", "../cache", "~/cache"])
def test_a_relative_folder_is_refused(monkeypatch, text):
    monkeypatch.setenv(CACHE_VARIABLE, text)
    with pytest.raises(OptionError, match=f"^{CACHE_VARIABLE}='.*' is not an absolute path"):
        kernel_folder()


def test_a_relative_folder_ends_a_command_with_one_line(tmp_path, model_file):
    result = run(
        "quantize", model_file, "-o", tmp_path / "out.safetensors", **{CACHE_VARIABLE: "x"}
    )
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1
    assert result.stderr.startswith(b"Error: FP4KIT_CACHE_DIR='x' is not an absolute path")


def test_a_relative_xdg_folder_is_ignored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernel_folder().path.parent == tmp_path / "home" / ".cache" / "fp4kit"
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("home", [None, "", "."])
def test_without_a_home_nothing_is_kept(tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)

    def unknown(_uid):
        raise KeyError("no entry")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert kernel_folder() == KernelFolder(None, "no home folder is known")
    assert list(tmp_path.iterdir()) == []


def test_folders_are_private_under_any_umask(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        folder = kernel_folder().path
    finally:
        os.umask(before)
    made = [folder, *folder.parents[:3]]
    assert made[-1] == tmp_path / "a"
    assert [mode(path) for path in made] == [0o700] * 4


# ------------------------------------------------------------------------------------------------
# Whom to trust
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0o777, 0o775, 0o707, 0o720])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_no_folder_that_others_can_write_to(root, bits, level):
    victim = [root.parent, root, root / "fp4kit", trusted()][level]
    before = mode(victim)
    victim.chmod(bits)
    reason = kernel_folder().reason
    victim.chmod(before)
    assert reason == f"others can write to {victim} (chmod go-w changes that)"


def test_a_sticky_folder_may_hold_ours(root):
    root.chmod(0o1777)
    trusted()


@pytest.mark.parametrize("level", [1, 2])
def test_the_sticky_bit_does_not_excuse_our_own(root, level):
    folder = trusted()
    victim = [folder, folder.parent][level - 1]
    victim.chmod(0o1777)
    assert "others can write to" in kernel_folder().reason


@pytest.mark.parametrize("level", [0, 1, 2])
def test_no_folder_of_another_user(root, monkeypatch, level):
    victim = [root, root / "fp4kit", trusted()][level]
    look = Path.lstat

    def lstat(path):
        info = list(look(path))
        if path == victim:
            info[stat.ST_UID] = NOBODY
        return os.stat_result(info)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert kernel_folder().reason == f"{victim} belongs to another user"


@pytest.mark.parametrize("level", [1, 2])
def test_no_link_in_place_of_our_folder(root, tmp_path, level):
    victim = [root / "fp4kit", trusted()][level - 1]
    victim.rename(tmp_path / "planted")
    victim.symlink_to(tmp_path / "planted")
    assert kernel_folder().reason == f"{victim} is a link"


def test_a_link_of_the_user_may_lead_to_the_cache(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    trusted()
    (tmp_path / "disk").chmod(0o777)
    assert kernel_folder().reason.startswith(f"others can write to {tmp_path / 'disk'}")


def test_a_file_in_the_way_is_a_reason(root):
    (root / "fp4kit").write_text("")
    assert kernel_folder().reason.startswith(f"{root / 'fp4kit'}")


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------

PAYLOAD = bytes(range(256)) * 4
DAMAGE = {
    "empty": lambda content: b"",
    "a byte": lambda content: content[:1],
    "only the checksum": lambda content: content[:32],
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "zeros": lambda content: bytes(len(content)),
    **{
        f"bit {bit}": lambda content, bit=bit: bytes(
            byte ^ (1 << bit % 8 if place == bit // 8 else 0) for place, byte in enumerate(content)
        )
        for bit in (0, 255, 256, 4321)
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_discarded(root, damage):
    kernel_cache.write("a.kernel", PAYLOAD)
    file = kernel_folder().path / "a.kernel"
    assert kernel_cache.read("a.kernel") == PAYLOAD
    assert mode(file) == 0o600
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert kernel_cache.read("a.kernel") is None
    assert not file.exists()


def test_only_our_own_regular_files_are_read(root, tmp_path, monkeypatch):
    kernel_cache.write("a.kernel", PAYLOAD)
    folder = kernel_folder().path
    file = folder / "a.kernel"
    (folder / "link.kernel").symlink_to(file)
    os.mkfifo(folder / "pipe.kernel")
    (folder / "folder.kernel").mkdir()
    for name in ("link", "pipe", "folder", "missing"):
        assert kernel_cache.read(f"{name}.kernel") is None
    assert kernel_cache.read("a.kernel") == PAYLOAD
    file.chmod(0o620)
    assert kernel_cache.read("a.kernel") is None


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_what_cannot_be_written_is_given_up_and_told(root, monkeypatch, error):
    told = []
    kernel_cache.on_compile(told.append)
    kernel_cache.compiling()
    folder = kernel_folder()

    def refuse(*_args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(kernel_cache.os, "fdopen", refuse)
    kernel_cache.write("a.kernel", PAYLOAD)
    kernel_cache.write("b.kernel", PAYLOAD)
    kernel_cache.on_compile(None)
    assert told == [folder, KernelFolder(None, f"{folder.path}: {os.strerror(error)}")]
    assert list(folder.path.iterdir()) == []


def test_what_is_there_is_read_when_nothing_can_be_written(root, monkeypatch):
    kernel_cache.write("a.kernel", PAYLOAD)

    def refuse(*_args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache.os, "fdopen", refuse)
        kernel_cache.write("b.kernel", PAYLOAD)
    assert kernel_folder().path is None
    assert kernel_cache.read("a.kernel") == PAYLOAD


def test_kernels_are_kept_and_compiled_anew_when_damaged(root):
    def add(x):
        return x + np.float32(1)

    def result():
        kernel = jit_of()(add)
        assert kernel(np.float32(2)) == 3
        return sum(kernel.stats.cache_hits.values())

    told = []
    kernel_cache.on_compile(told.append)
    assert result() == 0
    (file,) = kernel_folder().path.iterdir()
    assert result() == 1
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    assert result() == 0
    assert result() == 1
    kernel_cache.on_compile(None)
    assert told == [kernel_folder()]
