"""What the operator sets: policies, keys, usage, and Weir itself."""

from proxy.dashboard.visit import PageVisit, View


async def todo(visit: PageVisit) -> View:
    return View("error.html", {"message": "Not built yet."})


policies = policy = save_policy = delete_policy = trial = play = keys = create_key = rotate_key = revoke_key = usage = (
    usage_csv
) = system = forget = todo
