"""Calls of a session that ends while they are under way leave nothing behind, and repeated names cost nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base import slices
from storage.base.errors import NotFoundError
from tests.unit.paramserver.sessions.builders import begin, connect, join, service, serving
from tests.unit.storage.builders import Layout

LAYOUT = Layout(with_skips=False)


async def test_a_prefetch_makes_no_window_for_a_session_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The event loop runs other tasks before each item of a long loop.
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1.0)
    async with serving(tmp_path) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        wants = [pb.PrefetchRequest.Want(slab=pb.SlabName(group=group, kind=pb.KIND_PARAM)) for group in LAYOUT.groups]
        call = asyncio.ensure_future(service(engine, sessions).Prefetch(pb.PrefetchRequest(wants=wants), session))
        await asyncio.sleep(0)
        sessions.end(session, "closed", is_closed=True)
        with pytest.raises(NotFoundError, match="the session is unknown or has ended"):
            await call
        assert engine.queue.owners == []


async def test_no_spans_are_collected_for_a_session_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (engine, sessions):
        opening, go_on, open_job = asyncio.Event(), asyncio.Event(), engine.open_job

        async def slow(*arguments: Any, **options: Any) -> Any:
            opening.set()
            await go_on.wait()
            return await open_job(*arguments, **options)

        monkeypatch.setattr(engine, "open_job", slow)
        session, store = connect(sessions), service(engine, sessions)
        joining = asyncio.ensure_future(join(sessions, session, LAYOUT.job()))
        await opening.wait()
        call = asyncio.ensure_future(store.CollectSpans(pb.CollectSpansRequest(), session))
        await asyncio.sleep(0)
        sessions.end(session, "closed", is_closed=True)
        go_on.set()
        await asyncio.wait([joining])
        with pytest.raises(NotFoundError, match="the session is unknown or has ended"):
            await call
        assert not store._traces._collections


async def test_a_slab_that_a_request_names_a_thousand_times_is_read_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        one, other = (pb.SlabName(group=group, kind=pb.KIND_PARAM) for group in LAYOUT.groups[:2])
        with mock.patch.object(engine.reader, "digest", wraps=engine.reader.digest) as read:
            slabs = [*[one] * 1000, other]
            found = await service(engine, sessions).DigestSlabs(pb.DigestSlabsRequest(slabs=slabs), session)
        assert len(found.slabs) == 1001
        assert all(slab == found.slabs[0] for slab in found.slabs[:1000])
        assert [call.args[1] for call in read.mock_calls] == [one.group, other.group]
