import asyncio, shutil
from dataclasses import replace
from tests.gateway.conftest import *
from tests.gateway.conftest import opened
async def test_pg(planted, tmp_path, postgres_url):
    folder = tmp_path / "i"; shutil.copytree(planted, folder)
    async with opened(folder, FakeClock()) as instance:
        ledger = await open_ledger(postgres_url)
        inst = replace(instance, ledger=ledger)
        app = create_app(inst, [KEY], monotonic=time.monotonic, new_id=new_id, options=FREE)
        g = Gateway(instance=inst, app=app, clock=FakeClock(), key=KEY)
        c = g.client("owner", name="iryna"); o = g.client("orchestrator")
        W = [("/agents/run", {"agent_slug": VIOLIN}, c), ("/jobs", {"type":"work","payload":1}, c), ("/inbox/submit", {"intent":{"action":"job","target":"w","payload":{"type":"w"}}}, c), (f"/memory/{VIOLIN}/propose", {"summary":"s","updates":[{"file":"facts.md","operation":"append","content":"- x"}]}, o)]
        for path, body, cl in W:
            a = await asyncio.gather(*(cl.post(path, json=body, headers={"Idempotency-Key":"k"}) for _ in range(30)))
            print(path, {x.status_code for x in a}, len({x.content for x in a}), a[0].text[:120], sum("Idempotency-Replayed" not in x.headers for x in a))
        n = {"intent":{"action":"propose-note","target":f"{VIOLIN}/notes/a.md","payload":{"summary":"s","change":{"type":"create","text":"t"}}}}
        for _ in range(2): print((await c.post("/inbox/submit", json=n)).text[:300])
        e = {**n, "id": "inbox_x"}
        for _ in range(2): r = await c.post("/inbox/submit", json=e); print(r.status_code, r.headers.get("Idempotency-Replayed"), r.text[:200])
        print((await g.client("owner", name="b").post("/inbox/submit", json=e)).text[:200])
        print((await c.get("/inbox/stats")).text, (await c.get("/jobs?status=queued")).text[:200], (await c.get("/proposals/pending")).status_code)
        await g.close(); await ledger.close()
