# SPDX-License-Identifier: Apache-2.0
"""What each method of a strategy hands over, and what it makes of the answers: against a table that notes what it is asked."""
import ctypes
import functools
import time
from ctypes import POINTER, Structure, c_double, cast, pointer, sizeof

from support import *  # noqa: F403
from stratagem._text import read_text
from stratagem.trees import Tree, take_tree

RESULTS = {abi.stg_update_result: {"outcome": abi.STG_UPDATE_SKIPPED_OVERFLOW, "gradient_norm": 3.0, "total_weight": 4.0, "loss_scale": 5.0},
           abi.stg_status: {"state": abi.STG_STATE_EVALUATE, "stage": 1, "num_micro_batches": 3, "num_updates": 4, "has_graph": 1},
           abi.stg_ranks: {"global_rank": 1, "local_rank": 2, "node_rank": 3, "world_size": 4},
           abi.stg_step_result: {"weights": cast((c_double * 2)(1.5, 2.5), POINTER(c_double)), "num_weights": 2}, abi.stg_model_description: {}}


def is_answered(place):
    """Fills an output. Its type tells whether it is one."""
    if isinstance(place, abi.stg_tree):
        if place.release or place.root.type != abi.STG_NONE:
            return False
        pointer(place)[0] = Tree('"out"').abi
    elif type(place) in RESULTS:
        for name, value in RESULTS[type(place)].items():
            setattr(place, name, value)
        if isinstance(place, abi.stg_step_result):
            is_answered(place.outputs)
    elif isinstance(place, Structure):
        return False
    else:
        place.value = 7
    return True


def said(given):
    """What was handed over, without what is zero."""
    if isinstance(given, abi.stg_string):
        return read_text(given)
    if isinstance(given, abi.stg_tree):
        return take_tree(given)
    if isinstance(given, abi.stg_device):
        return given.kind, given.index
    if isinstance(given, ctypes._Pointer):
        return said(given.contents) if given else None
    if isinstance(given, Structure):
        names = [name for name, _ in given._fields_ if name not in ("struct_size", "host", "model", "stream")]
        return {name: value for name in names if (value := said(getattr(given, name)))}
    return given


class Recorder:
    """In the place of a plugin."""

    def __init__(self):
        self.asked = []
        self.api = abi.stg_strategy_api(struct_size=sizeof(abi.stg_strategy_api))
        for name, kind in abi.stg_strategy_api._fields_[1:]:
            setattr(self.api, name, kind(functools.partial(self._note, name)))
        self.factory = abi.stg_strategy_factory(struct_size=sizeof(abi.stg_strategy_factory), api=pointer(self.api))

    def strategy_factory(self, name):
        return self.factory

    def _note(self, name, *given):
        inputs = given if name == "create" else given[1:]
        self.asked.append((name, [said(one) for one in inputs if not (isinstance(one, ctypes._Pointer) and one and is_answered(one.contents))]))


X = {"x": 1}
STEP = {"batch_index": 2, "dataloader_index": 3, "global_step": 4}
LAST, ANOMALY, STRICT, COPY = abi.STG_BATCH_LAST_MICRO_BATCH, abi.STG_BATCH_DETECT_ANOMALY, abi.STG_IMPORT_STRICT, abi.STG_EXPORT_COPY
NORM, VALUE = ({"clip": kind, "clip_limit": 0.25, "lr": 0.5} for kind in (abi.STG_CLIP_NORM, abi.STG_CLIP_VALUE))
CPU1, ANYWHERE = (abi.STG_DEVICE_CPU, 1), (abi.STG_DEVICE_NONE, -1)

# A call, the function of the table, and what it is given after the stg_call.
CALLS = [
    (lambda s: s.training_step(X, **STEP, detect_anomaly=True), "training_step", [{"batch": X, **STEP, "flags": ANOMALY}]),
    (lambda s: s.training_step(announced=9), "training_step", [{"announced": 9}]),
    (lambda s: s.backward(), "backward", [LAST]),
    (lambda s: s.backward(last=False, detect_anomaly=True), "backward", [ANOMALY]),
    (lambda s: s.optimizer_step(0.5), "optimizer_step", [{"lr": 0.5}]),
    (lambda s: s.optimizer_step(0.5, clip_norm=0.25), "optimizer_step", [NORM]),
    (lambda s: s.optimizer_step(0.5, clip_value=0.25), "optimizer_step", [VALUE]),
    (lambda s: s.train_batch(X, 0.5, clip_norm=0.25, **STEP), "train_batch", [{"batch": X, **STEP, "update": NORM, "flags": LAST}]),
    (lambda s: s.train_batch(X, 0.5, clip_value=0.25, detect_anomaly=True), "train_batch", [{"batch": X, "update": VALUE, "flags": LAST | ANOMALY}]),
    (lambda s: s.train_batch(announced=9, lr=0.5, last=False), "train_batch", [{"announced": 9}]),
    (lambda s: s.zero_grad(), "zero_grad", []),
    (lambda s: s.gradients(), "gradients", []),
    (lambda s: s.parameters_changed(), "parameters_changed", []),
    (lambda s: s.model_to_device(), "model_to_device", []),
    (lambda s: s.teardown(), "teardown", []),
    (lambda s: s.setup(stage="validate"), "setup", [{"stage": abi.STG_STAGE_VALIDATE}]),
    (lambda s: s.setup(state=X), "setup", [{"state": X}]),
    (lambda s: s.batch_to_device(X), "batch_to_device", [{"batch": X, "device": ANYWHERE}]),
    (lambda s: s.batch_to_device(X, ("cpu", 1), 5), "batch_to_device", [{"batch": X, "device": CPU1, "dataloader_index": 5}]),
    (lambda s: s.broadcast(X, 3), "broadcast", [X, 3]),
    (lambda s: s.all_gather(X), "all_gather", [X]),
    (lambda s: s.to_host(X), "to_host", [X]),
    *[(lambda s, op=op: s.reduce(X, op), "reduce", [X, number])
      for op, number in (("mean", abi.STG_REDUCE_MEAN), ("sum", abi.STG_REDUCE_SUM), ("min", abi.STG_REDUCE_MIN), ("max", abi.STG_REDUCE_MAX))],
    (lambda s: s.reduce_boolean_decision(True), "reduce_boolean_decision", [1, abi.STG_DECIDE_ALL]),
    (lambda s: s.reduce_boolean_decision(False, "any"), "reduce_boolean_decision", [0, abi.STG_DECIDE_ANY]),
    (lambda s: s.barrier("here"), "barrier", ["here"]),
    (lambda s: s.announce_batch(X, "test", 5), "announce_batch", [{"batch": X, "device": ANYWHERE, "dataloader_index": 5}, abi.STG_STAGE_TEST]),
    *[(lambda s, name=name: getattr(s, name)(X, **STEP), name, [{"batch": X, **STEP}]) for name in ("validation_step", "test_step", "predict_step")],
    *[(lambda s, name=name: getattr(s, name)(announced=9), name, [{"announced": 9}]) for name in ("validation_step", "test_step", "predict_step")],
    (lambda s: s.reduce_gradients([stratagem.GradientSet([None], 2.5, ("cpu", 1))], "sum"), "reduce_gradients",
     [{"op": abi.STG_REDUCE_SUM, "num_sets": 1, "sets": {"device": CPU1, "weight": 2.5, "num_gradients": 1}}]),
    (lambda s: s.export_state(), "export_state", [0]),
    (lambda s: s.export_state(copy=True), "export_state", [COPY]),
    (lambda s: s.import_state(X), "import_state", [X, STRICT]),
    (lambda s: s.import_state(X, strict=False), "import_state", [X, 0]),
    (lambda s: s.save("/a", {"b": 1}), "save", [{"path": "/a", "host_json": '{"b": 1}'}]),
    (lambda s: s.load("/a"), "load", [{"path": "/a", "flags": STRICT}]),
    (lambda s: s.load(pathlib.Path("/a"), strict=False), "load", [{"path": "/a"}]),
]


class Calls(Case):
    def setUp(self):
        self.plugin = Recorder()
        self.made = stratagem.Strategy(self.plugin, config={"devices": 3}, caller_thread_only=True)
        self.addCleanup(self.made.close)

    def last(self):
        return self.plugin.asked[-1]

    def test_each_method_hands_over_what_it_was_given(self):
        for number, (call, name, expected) in enumerate(CALLS):
            with self.subTest(name, number=number):
                call(self.made)
                self.assertEqual(self.last(), (name, [None, *expected]))

    def test_a_time_limit_goes_with_each_call(self):
        for number, (call, name, expected) in enumerate(CALLS):
            with self.subTest(name, number=number):
                self.made.timeout_s = 100
                before = time.monotonic_ns()
                call(self.made)
                limit = self.last()[1][0]["deadline_ns"] - int(100e9)
                self.assertTrue(before <= limit <= time.monotonic_ns(), limit)

    def test_what_is_answered_is_told(self):
        update = stratagem.UpdateResult("skipped: overflow", 3.0, 4.0, 5.0)
        step = stratagem.StepResult('"out"', (1.5, 2.5))
        for found, expected in ((self.made.optimizer_step(0.5), update), (self.made.train_batch(X, 0.5), (step, update)),
                                *((getattr(self.made, name)(X), step) for name in ("training_step", "validation_step", "test_step", "predict_step")),
                                (self.made.status(), stratagem.Status("evaluate", 3, 4, True)), (self.made.ranks(), stratagem.Ranks(1, 2, 3, 4)),
                                *((getattr(self.made, name)(X), '"out"') for name in ("batch_to_device", "broadcast", "all_gather", "to_host", "reduce")),
                                *((getattr(self.made, name)(), '"out"') for name in ("gradients", "export_state")),
                                (self.made.import_state(X), '"out"'), (self.made.load("/a"), ("out", '"out"')), (self.made.announce_batch(X), 7),
                                (self.made.reduce_boolean_decision(False), True)):
            self.assertEqual(found, expected)

    def test_create_abort_and_destroy(self):
        self.assertEqual(self.plugin.asked, [("create", [{"config_json": '{"devices": 3}', "flags": abi.STG_CREATE_CALLER_THREAD_ONLY}])])
        self.made.abort()
        self.assertEqual(self.last(), ("abort", []))
        self.made.close()
        self.assertEqual(self.last(), ("destroy", []))

    def test_closing_while_a_call_goes_on_gives_it_up(self):
        with self.made._gate:
            self.made.close()
            self.assertEqual(self.last(), ("abort", []))
        self.assertEqual(self.last(), ("destroy", []))

    def test_what_can_not_be_meant_is_refused_before_the_call(self):
        for call, part in ((lambda: self.made.optimizer_step(0.5, clip_norm=1, clip_value=1), "one way"),
                           (lambda: self.made.training_step(X, announced=9), "not both"), (lambda: self.made.reduce(X, "most"), "mean, sum, min, max"),
                           (lambda: self.made.setup(stage="fitt"), "fit, validate, test, predict")):
            with self.assertError(Code.INVALID_ARGUMENT, part):
                call()
        self.assertEqual(len(self.plugin.asked), 1)


if __name__ == "__main__":
    unittest.main()
