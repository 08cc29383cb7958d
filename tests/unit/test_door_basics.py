from tests.fakes.door_world import Gateway, World, request_id, submission


def test_a_request_is_opened_runs_and_finishes() -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    gateway.read()
    sub = submission(request_id(1), emitted=((), ()))
    book = gateway.expect(sub)
    (result,) = world.submit(sub)
    assert result.HasField("admitted")
    for _ in range(10):
        world.step()
        gateway.read()
    assert book.ending == "finished"
    assert book.choices == world.expected(sub)
    assert world.door.held == 0
