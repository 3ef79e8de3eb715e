# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a command was given: the values of its options, each under one name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4kit.io.candidates import DEFAULT_CANDIDATES


@dataclass
class Given:
    """What a command was given; each command has some of these options."""

    source: Path = Path()
    other: Path = Path()
    target: Path | None = None
    scheduler: str | None = None
    part: str | None = None
    source_url: str = ""
    target_url: str = ""
    format: Any = "nvfp4"
    recipe: str | None = None
    scale_rule: str | None = None
    granularity: str | None = None
    scale_layout: str = "linear"
    nibble_order: str = "low_first"
    scale_search: str | None = None
    search_error: str | None = None
    e4m3_max: int = 448
    dtype: Any = None
    device: str = "auto"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    layout: Any = None
    weights_only: bool = False
    activations: str | None = None
    experts_layout: Any = None
    unscaled_fp8: bool = False
    lossless: bool = False
    max_shard_size: str | None = None
    resume: bool = False
    follow_links: bool = False
    void_dtype: str | None = None
    cast: str | None = None
    pad: bool = False
    plan: Path | None = None
    plan_file: Path | None = None
    budget: str | None = None
    pins: tuple[str, ...] = ()
    moments: Path | None = None
    text: Path | None = None
    length: int = 0
    effects: bool = True
    formats: str = ",".join(DEFAULT_CANDIDATES)
    allow_nothing: bool = False
    against: Path | str | None = None
    template: Path | None = None
    min_sqnr: float | None = None
    dry_run: bool = False
    every: bool = False
    report_file: Path | None = None
    html: Path | None = None
    before: Path | None = None
    force: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        """Tells URLs from paths: a command that takes none finds no such file."""
        if self.source is None:
            self.source = Path()
        elif isinstance(self.source, str):
            self.source_url, self.source = self.source, Path(self.source)
        if isinstance(self.target, str):
            self.target_url, self.target = self.target, Path(self.target)

    @property
    def workers(self) -> str | None:
        """Who shares the work, None if this process does it alone."""
        return self.scheduler or self.part

    @property
    def is_shared(self) -> bool:
        """Whether workers or URLs take part: then the input is a model directory."""
        return bool(self.workers or self.source_url or self.target_url)

    @property
    def where(self) -> str:
        """The source as the library takes it."""
        return self.source_url or str(self.source)

    @property
    def from_where(self) -> str | None:
        """The source as the library takes it, None if none was given."""
        return None if self.source == Path() else self.where

    @property
    def whither(self) -> str | None:
        """The target as the library takes it."""
        return self.target_url or (None if self.target is None else str(self.target))

    @property
    def output(self) -> Path:
        """The output of a command that must have one."""
        assert self.target is not None
        return self.target

    def pick(self, *names: str) -> dict[str, Any]:
        """Some options by name, as the functions of the library take them."""
        return {name: getattr(self, name) for name in names}
