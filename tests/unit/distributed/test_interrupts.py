"""The first signal is a wish, the second an order; afterwards everything is as before."""

import os
import signal
import threading

import pytest
from running import PATIENCE_SECONDS

from rlhf_core.distributed.interrupts import INTERRUPT_FILE, InterruptFlag


@pytest.mark.usefixtures("sighup_not_ignored")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_asks_and_the_second_stops(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), InterruptFlag() as flag:
        assert not flag()
        os.kill(os.getpid(), number)
        assert flag()
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_the_signal_of_a_batch_system_may_arrive_again_and_ctrl_c_still_stops(caplog):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt), InterruptFlag() as flag:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert flag()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert "SIGUSR1: stopping after this episode, with a checkpoint" in caplog.text
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGUSR1) == before


class InterruptedAtItsEnd:
    """A signal that arrives while Python ends an object: what its handler raises there is dropped."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # room for the handler to run
            pass


def test_an_order_that_python_drops_is_heard_again(capfd):
    with pytest.raises(KeyboardInterrupt), InterruptFlag() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag()
        InterruptedAtItsEnd()
        threading.Event().wait(PATIENCE_SECONDS)
    assert capfd.readouterr().err == ""


def test_a_launcher_asks_through_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(INTERRUPT_FILE, str(tmp_path / "stop"))
    with InterruptFlag() as flag:
        assert not flag()
        (tmp_path / "stop").touch()
        assert flag()


def test_outside_the_main_thread_it_is_inert():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with InterruptFlag() as flag:
            seen.append((flag(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert seen == [(False, before)]


def test_a_run_under_nohup_does_not_hear_the_terminal_go():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with InterruptFlag() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not flag()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_that_a_library_raises_in_place_of_the_second_interrupt_is_that_interrupt():
    with InterruptFlag() as flag:
        with pytest.raises(ValueError, match="a failure"), flag.unswallowed():
            os.kill(os.getpid(), signal.SIGINT)
            raise ValueError("a failure of its own, after the first signal")
        with pytest.raises(KeyboardInterrupt) as caught, flag.unswallowed():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                raise ValueError("could not determine the shape") from None  # as torch does inside a conversion
        assert isinstance(caught.value.__cause__, ValueError)
