# SPDX-License-Identifier: Apache-2.0
"""The repository on disk: what is a model there, what is a version, and which names are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actorserve.actors.repository import CONFIG_MAX_BYTES, Repository, check_model_name
from actorserve.errors import ConfigError, InvalidArgument, NotFound

CONFIG = 'backend: "python"\ninput [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'


def add(root: Path, name: str, *versions: str, config: str | None = CONFIG) -> Path:
    """Add a model with these version folders."""
    folder = root / name
    folder.mkdir(parents=True)
    for version in versions:
        (folder / version).mkdir()
        (folder / version / "model.py").write_text("")
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a", "add_sub", "a.b", "a-b", "A1", "模型", "a b", "a..b", "x" * 255]
)
def test_names_that_are_fine(name):
    """Letters of any script, digits, dots inside, dashes, spaces."""
    check_model_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", ".hidden", "a/b", "/etc", "..\\x", "a\\b", "a\0b", "a\nb", "a\x7fb", "a;b",
        "a|b", "a&b", "a$b", "a`b", "a<b", "a>b", "a(b", "a)b", "a[b", "a]b", "a{b", "a}b", 'a"b',
        "a'b", "a*b", "a?b", "a~b", "a#b", "a!b", "x" * 256, "é" * 128,
    ],
)  # fmt: skip
def test_names_that_must_not_become_a_path(name):
    """Separators, controls, what a shell would read, and what no file system holds."""
    with pytest.raises(InvalidArgument, match="model name"):
        check_model_name(name)


@pytest.mark.parametrize("name", ["../outside", "a/b", "", ".git"])
def test_a_name_from_outside_never_leads_out(tmp_path, name):
    """find() refuses it before it looks."""
    add(tmp_path, "outside", "1")
    (tmp_path / "inside").mkdir()
    with pytest.raises(InvalidArgument):
        Repository([tmp_path / "inside"]).find(name)


# --- what is a model -----------------------------------------------------------------------------


def test_models_are_the_visible_folders(tmp_path):
    """In alphabetical order; files and hidden folders are none."""
    for name in ("b", "a", "c"):
        add(tmp_path, name, "1")
    add(tmp_path, ".hidden", "1")
    (tmp_path / "file").write_text("")
    assert list(Repository([tmp_path]).scan()) == ["a", "b", "c"]


def test_a_folder_with_a_bad_name_is_a_model_with_a_problem(tmp_path):
    """It is not passed over in silence."""
    add(tmp_path, "a$b", "1")
    repository = Repository([tmp_path])
    entry = repository.scan()["a$b"]
    assert entry.problem == "model name 'a$b' contains the character '$'"
    with pytest.raises(ConfigError, match="contains the character"):
        repository.read(entry)


def test_links_are_followed(tmp_path):
    """Repositories are often assembled from them; a dangling one is no model."""
    real = add(tmp_path / "store", "real", "1")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "linked").symlink_to(real)
    (tmp_path / "repo" / "dangling").symlink_to(tmp_path / "nowhere")
    repository = Repository([tmp_path / "repo"])
    assert list(repository.scan()) == ["linked"]
    source = repository.read(repository.find("linked"))
    assert (source.config.name, source.versions) == ("linked", (1,))


def test_several_repositories_are_one_unless_a_model_is_in_two(tmp_path):
    """A name that appears twice loads from neither."""
    add(tmp_path / "one", "a", "1")
    add(tmp_path / "two", "b", "1")
    for number in ("one", "two", "three"):
        add(tmp_path / number, "both", "1")
    repository = Repository([tmp_path / "one", tmp_path / "two", tmp_path / "three"])
    entries = repository.scan()
    assert list(entries) == ["a", "b", "both"]
    assert entries["a"].path == tmp_path / "one" / "a"
    assert entries["both"].problem == "model appears in two or more repositories"


def test_a_repository_named_twice_is_one(tmp_path, monkeypatch):
    """Its models are not duplicates of themselves."""
    add(tmp_path / "repo", "a", "1")
    monkeypatch.chdir(tmp_path)
    repository = Repository([tmp_path / "repo", "repo", str(tmp_path / "repo") + "/"])
    assert repository.scan()["a"].problem is None
    assert repository.paths == [tmp_path / "repo"]


def test_each_look_sees_the_disk_as_it_is(tmp_path):
    """Nothing is kept from the look before."""
    repository = Repository([tmp_path])
    with pytest.raises(NotFound, match="failed to poll from model repository"):
        repository.find("late")
    add(tmp_path, "late", "1")
    assert repository.read(repository.find("late")).versions == (1,)
    (tmp_path / "late" / "2").mkdir()
    assert repository.read(repository.find("late")).versions == (1, 2)


# --- the repository itself -----------------------------------------------------------------------


def test_no_repository_is_refused():
    """At least one is needed."""
    with pytest.raises(InvalidArgument, match="at least one model repository"):
        Repository([])


def test_a_missing_repository_is_named(tmp_path):
    """A path that is not there, and one that is a file."""
    Repository([tmp_path]).check()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(NotFound, match=f"model repository '{path}' is not a directory"):
            Repository([tmp_path, path]).check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_repository_is_named(tmp_path):
    """With the system's reason."""
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(NotFound, match="is not readable: Permission denied"):
        Repository([tmp_path / "closed"]).check()


# --- versions ------------------------------------------------------------------------------------


def test_versions_are_plain_numbers(tmp_path):
    """No sign, space, leading zero, other digits or letters; files are none."""
    names = ["0", "1", "2", "10", "123456789012", "01", "-1", "+2", "1.0", "v1", " 3", "٤", "5_0"]
    folder = add(tmp_path, "m", *names)
    (folder / "7").write_text("")
    repository = Repository([tmp_path])
    assert repository.read(repository.find("m")).versions == (0, 1, 2, 10, 123456789012)


def test_a_model_without_versions_is_read(tmp_path):
    """Whether that is an error is for whoever loads it."""
    add(tmp_path, "m")
    repository = Repository([tmp_path])
    assert repository.read(repository.find("m")).versions == ()


# --- configurations ------------------------------------------------------------------------------


def test_a_configuration_is_completed(tmp_path):
    """With the folder's name, and python for a model.py without a config."""
    add(tmp_path, "m", "1", config=None)
    repository = Repository([tmp_path])
    config = repository.read(repository.find("m")).config
    assert (config.name, config.backend) == ("m", "python")
    assert config.default_model_filename == "model.py"
    assert [group.name for group in config.instance_group] == ["m"]


def test_a_mistake_has_file_line_and_column(tmp_path):
    """As editors read them."""
    add(tmp_path, "m", "1", config=CONFIG + "max_batch_size: many\n")
    repository = Repository([tmp_path])
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/m/config\.pbtxt:3:17: max_batch_size: "):
        repository.read(repository.find("m"))


def test_another_name_in_the_configuration_is_refused(tmp_path):
    """It must be the folder's."""
    add(tmp_path, "m", "1", config=f'name: "n" {CONFIG}')
    repository = Repository([tmp_path])
    with pytest.raises(ConfigError, match="unexpected directory name 'm' for model 'n'"):
        repository.read(repository.find("m"))


def test_a_configuration_that_cannot_be_read_is_named(tmp_path):
    """A folder in its place, and one beyond any size."""
    folder = add(tmp_path, "m", "1", config=None)
    (folder / "config.pbtxt").mkdir()
    repository = Repository([tmp_path])
    with pytest.raises(ConfigError, match=r"'.*config.pbtxt' is no regular file"):
        repository.read(repository.find("m"))
    (folder / "config.pbtxt").rmdir()
    with (folder / "config.pbtxt").open("wb") as stream:
        stream.truncate(CONFIG_MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="is longer than 16777216 bytes"):
        repository.read(repository.find("m"))


def test_a_model_that_goes_while_it_is_read_is_an_error(tmp_path):
    """Somebody removes the folder between the look and the read."""
    folder = add(tmp_path, "m")
    repository = Repository([tmp_path])
    entry = repository.find("m")
    (folder / "config.pbtxt").unlink()
    folder.rmdir()
    with pytest.raises(ConfigError, match="cannot read"):
        repository.read(entry)


def test_what_cannot_be_looked_at_is_no_model(tmp_path, monkeypatch):
    """A link into a closed folder does not take the other models along."""
    add(tmp_path, "good", "1")
    (tmp_path / "closed").mkdir()
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert set(Repository([tmp_path]).scan()) == {"good"}


def test_half_a_character_is_no_name():
    """Not an error of the codec."""
    with pytest.raises(InvalidArgument, match="half a character"):
        check_model_name("a\ud800")
