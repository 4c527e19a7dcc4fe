"""Loading and unloading: who may, what others see meanwhile, and that nobody's answer is cut."""
import concurrent.futures
import gc
import threading
import time
from pathlib import Path

import httpx
import pytest

from hetero.engine.scripted import Script
from hetero.serve.door import Settings

BOSS, GUEST = {"Authorization": "Bearer boss"}, {"x-api-key": "guest"}
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def admin(make_stage):
    return make_stage(settings=Settings(keys=("guest",), admin_keys=("boss",), drain_s=20))


def until(stage, state):
    end = time.monotonic() + 10
    while stage.seat.state != state:
        assert time.monotonic() < end, stage.seat.state
        time.sleep(0.01)


def test_the_admin_key_opens_everything_and_a_guest_s_key_loads_nothing(admin, shared_stage):
    post = admin.http.post
    for path in ("/models/load", "/models/unload"):
        assert post(path, json={}).status_code == 401 and post(path, json={}, headers=GUEST).status_code == 401
        assert shared_stage.http.post(path, json={}).status_code == 403            # no admin key was made: closed for all
    assert post("/v1/chat/completions", json=HI, headers=BOSS).status_code == 200
    assert post("/v1/chat/completions", json=HI, headers={"Authorization": "Bearer bos"}).status_code == 401
    assert admin.seat.state == "ready"


def test_a_model_is_given_up_and_loaded_again(admin):
    post, get = admin.http.post, admin.http.get
    assert post("/models/unload", json={"model": "other"}, headers=BOSS).status_code == 404
    assert post("/models/unload", json={"model": "demo"}, headers=BOSS).json() == {"success": True, "status": "unloaded"}
    assert get("/health").json() == {"status": "no model"} and get("/ready").status_code == 503 and "hetero_up 0" in get("/metrics", headers=GUEST).text
    r = post("/v1/chat/completions", json=HI, headers=GUEST)
    assert r.status_code == 503 and r.json()["error"]["code"] == "model_not_ready" and "no model is loaded" in r.json()["error"]["message"] and r.headers["retry-after"]
    assert get("/v1/models", headers=GUEST).json()["data"][0]["status"] == {"value": "unloaded"}
    assert post("/models/unload", json={}, headers=BOSS).status_code == 409
    assert post("/models/load", json={"wait": True}, headers=BOSS).json()["status"] == "loaded"
    assert post("/v1/chat/completions", json=HI, headers=GUEST).json()["choices"][0]["message"]["content"] == "Hello there."
    assert post("/models/load", json={"model": "models/second", "served_model_name": "two", "wait": True}, headers=BOSS).status_code == 200
    assert admin.sources == ["models/demo", "models/demo", "models/second"] and get("/v1/models", headers=GUEST).json()["data"][0]["id"] == "two"
    assert post("/v1/chat/completions", json={**HI, "model": "two"}, headers=GUEST).json()["model"] == "two"


def test_while_a_model_is_loaded_the_port_is_open_and_says_so(admin):
    get = admin.http.get
    admin.load_s = 0.6
    assert admin.http.post("/models/load", json={}, headers=BOSS).json() == {"success": True, "status": "loading"}
    until(admin, "loading")
    health = get("/health")
    assert health.status_code == 503 and health.json()["status"] == "loading" and health.json()["error"]["message"] == "Loading model"
    assert get("/ready").status_code == 503 and get("/v1/models", headers=GUEST).json()["data"][0]["status"] == {"value": "loading"}
    assert admin.http.post("/v1/chat/completions", json=HI, headers=GUEST).json()["error"]["code"] == "model_not_ready"
    for path in ("/models/load", "/models/unload"):
        assert admin.http.post(path, json={}, headers=BOSS).status_code == 409
    until(admin, "ready")
    assert get("/health").status_code == get("/ready").status_code == 200


def test_a_model_that_cannot_be_loaded_is_told_and_another_can_be(admin):
    admin.loads_with = "no such folder\n\nhint: look again"
    r = admin.http.post("/models/load", json={"model": "nowhere", "wait": True}, headers=BOSS)
    assert r.status_code == 503 and "no such folder" in r.json()["error"]["message"]
    assert admin.http.get("/health").json() == {"status": "no model", "trouble": "no such folder hint: look again"}
    assert admin.http.get("/v1/models", headers=GUEST).json()["data"][0] | {"status": 0} == {"id": "nowhere", "object": "model", "created": 0, "owned_by": "hetero", "status": 0}
    admin.loads_with = None
    assert admin.http.post("/models/load", json={"wait": True}, headers=BOSS).status_code == 200
    assert admin.http.post("/v1/chat/completions", json=HI, headers=GUEST).status_code == 200


def test_unloading_waits_for_those_inside_and_force_does_not(admin):
    admin.says = Script((*admin.tok.encode("a b c d e f"), 2), delay_s=0.1)
    for force in (False, True):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(admin.http.post, "/v1/chat/completions", json=HI, headers=GUEST)
            while not admin.relay.active:
                time.sleep(0.01)
            assert admin.http.post("/models/unload", json={"force": force}, headers=BOSS).status_code == 200
            r = answer.result()
        assert (r.status_code, "unloaded" in r.text) == ((503, True) if force else (200, False)), r.text
        assert admin.http.post("/models/load", json={"wait": True}, headers=BOSS).status_code == 200


def test_loading_again_and_again_leaves_no_thread_and_no_pipe(admin):
    files, before = Path("/proc/self/fd"), None
    for _ in range(6):
        assert admin.http.post("/models/load", json={"wait": True}, headers=BOSS).status_code == 200
        admin.http.post("/v1/chat/completions", json=HI, headers=GUEST)
        if before is None:
            gc.collect()
            before = threading.active_count(), len([*files.iterdir()])
    gc.collect()
    end = time.monotonic() + 5
    while threading.active_count() > before[0] + 1 or len([*files.iterdir()]) > before[1] + 2:
        assert time.monotonic() < end, (before, threading.enumerate(), len([*files.iterdir()]))
        time.sleep(0.05)


def test_a_model_may_have_several_names(make_stage):
    stage = make_stage(settings=Settings(names=("first", "gpt-4o")))
    assert [m["id"] for m in stage.http.get("/v1/models").json()["data"]] == ["first", "gpt-4o"]
    for name in ("first", "gpt-4o", "demo", None):
        assert stage.chat(model=name).json()["model"] == "first"
    assert stage.chat(model="other").json()["error"]["code"] == "model_not_found"


def test_requests_have_ids_and_a_log_line_without_their_words(stage, caplog):
    with caplog.at_level("INFO", "hetero.serve"):
        r = stage.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "swordfish"}]}, headers={"x-request-id": "mine-1"})
        other = stage.http.get("/v1/models", headers={"x-request-id": "bad id!"})
        stage.http.get("/health")
        end = time.monotonic() + 5
        while len(caplog.records) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    assert r.headers["x-request-id"] == "mine-1" and other.headers["x-request-id"] not in ("bad id!", "")
    lines = [record.getMessage() for record in caplog.records]
    assert any("POST /v1/chat/completions 200" in line and "id=mine-1" in line for line in lines) and not any("swordfish" in line or "/health" in line for line in lines)


def test_the_time_limit_holds_also_where_nothing_comes(make_stage):
    stage = make_stage(settings=Settings(time_limit_s=0.4))
    stage.says = Script((5, 2), delay_s=1.5)
    assert stage.chat().json()["error"]["code"] == "timeout"
    events = stage.events()
    assert "0.4 s" in events[-2]["error"]["message"] and events[-1] == "[DONE]"
    with httpx.Client(base_url=stage.url, timeout=10) as http:
        assert http.get("/health").status_code == 200
    stage.until_idle(10)
