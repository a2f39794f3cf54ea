# SPDX-License-Identifier: Apache-2.0
"""Values in and out, without any library of ours: what goes in comes out, in the same memory, and is let go."""
import array
import ctypes
import threading
import unittest
import weakref

from support import *  # noqa: F403
from stratagem.trees import Tree, take_tree

try:
    import numpy
except ImportError:
    numpy = None


def through(value):
    return take_tree(Tree(value).abi)


class Values(Case):
    def test_every_kind_of_value_comes_back_as_it_was(self):
        value = {"b": [True, None, -5, 2**63 - 1, 0.5, "ünï", b"\0\1", (), [], {}], "a": (1, (2, [3]))}
        found = through(value)
        self.assertEqual(found, value)
        self.assertEqual([list(found), type(found["a"]), type(found["b"][0])], [["b", "a"], tuple, bool])

    def test_an_object_comes_back_as_the_same_object(self):
        self.assertEqual(len(trees._references), 0)
        opaque = stratagem.Opaque(object())
        self.assertIs(through([opaque])[0], opaque)

    def test_an_object_of_somebody_elses_is_handed_back(self):
        kind, count = dict(abi.stg_opaque._fields_), [1]
        retain, release = kind["retain"](lambda _: count.append(1)), kind["release"](lambda _: count.pop())
        theirs = abi.stg_opaque(ctypes.sizeof(abi.stg_opaque), errors.text("theirs"), retain, release)
        tree = Tree([None])
        tree.abi.root.as_.items[0].type, tree.abi.root.as_.items[0].as_.opaque = abi.STG_OPAQUE, ctypes.pointer(theirs)
        (found,) = take_tree(tree.abi)
        self.assertEqual((found.type_name, len(count)), ("theirs", 1))
        with Tree(found, moved=False) as given:
            self.assertEqual((ctypes.addressof(given.contents.root.as_.opaque.contents), len(count)), (ctypes.addressof(theirs), 2))
        self.assertEqual(len(count), 1)
        del found
        self.assertEqual(count, [])

    def test_objects_are_reduced_by_their_own_function(self):
        for reduce, expected in ((sum, 5), (lambda _: 1 / 0, None)):
            with Tree([stratagem.Opaque(2, reduce), stratagem.Opaque(3, reduce)], moved=False) as tree:
                items = tree.contents.root.as_.items
                objects, out = (ctypes.POINTER(abi.stg_opaque) * 2)(items[0].as_.opaque, items[1].as_.opaque), abi.stg_value(abi.STG_OPAQUE)
                address = objects[0].contents.reduce(objects, 2, ctypes.pointer(out.as_.opaque))
                if expected is None:
                    with self.assertError(Code.UNKNOWN, "ZeroDivisionError"):
                        errors.check(address)
                else:
                    self.assertEqual((address, take_tree(abi.stg_tree(out)).value), (None, expected))
                    out.as_.opaque.contents.release(out.as_.opaque)

    def test_what_is_no_value_is_refused_with_its_place(self):
        for value, parts in (({"a": [1, object()]}, ["/a/1", "builtins.object", "Opaque"]), ({1: 2}, ["the key 1 is no str"]),
                             ([2**63], ["/0", "64 bits"]), ({"a": "\ud800"}, ["/a", "no valid text"])):
            with self.assertError(Code.INVALID_ARGUMENT, *parts):
                Tree(value)
        loop = []
        loop.append(loop)
        with self.assertError(Code.INVALID_ARGUMENT, "64 levels", "hold itself"):
            Tree(loop)

    def test_what_was_filled_before_a_refusal_is_let_go(self):
        with self.assertError(Code.INVALID_ARGUMENT, "/1"):
            Tree([floats(1), object()])
        self.assertEqual(tensors._held, {})

    def test_a_borrowed_tensor_expires_with_its_callback_and_copies_stay(self):
        with Tree({"x": floats(1, 2)}, moved=False) as tree:
            lent = trees.Borrowed(tree.contents.root)
            tensor, copy = lent.value["x"], lent.value["x"].copy()
            self.assertEqual(tensor.tolist(), [1, 2])
            self.assertEqual(len({tensor.data_ptr, copy.data_ptr, through(tensor).data_ptr}), 3)
            lent.expire()
        with self.assertError(Code.FAILED_PRECONDITION, "lent for the time of a callback"):
            tensor.tolist()
        self.assertEqual(copy.tolist(), [1, 2])


class Buffers(Case):
    def test_an_array_goes_through_without_a_copy(self):
        values = array.array("d", [1, 2, 3])
        found = through({"x": values})["x"]
        self.assertEqual((found.data_ptr, found.dtype, found.shape, found.tolist()), (values.buffer_info()[0], "float64", (3,), [1, 2, 3]))
        found.buffer()[0] = 7
        self.assertEqual(values[0], 7)

    def test_strides_and_read_only_memory_are_kept(self):
        found = through(memoryview(array.array("i", range(6)))[::2])
        self.assertEqual((found.shape, found.strides, found.read_only), ((3,), (2,), False))
        self.assertTrue(through(memoryview(b"abc").cast("b")).read_only)

    def test_memory_is_held_as_long_as_a_view_of_it(self):
        values = array.array("f", [1])
        view = through(values).buffer()
        with self.assertRaises(BufferError):
            values.append(2)  # would move what the view is of
        self.assertEqual(view[0], 1)
        del view
        values.append(2)

    def test_a_tensor_tells_what_it_is(self):
        found = through(memoryview(array.array("i", range(6))).cast("B").cast("i", [2, 3]))
        self.assertEqual((repr(found), found.shape, found.strides, found.device, found.__dlpack_device__()),
                         ("Tensor(int32, (2, 3))", (2, 3), (3, 1), (1, 0), (1, 0)))
        self.assertEqual((through(floats(5)).item(), through(memoryview(floats(5)).cast("B").cast("f", [1, 1])).item()), (5, 5))
        with self.assertError(Code.INVALID_ARGUMENT, "6 elements, not one"):
            found.item()

    def test_a_copy_has_memory_of_its_own_and_the_same_strides(self):
        values = array.array("i", range(6))
        found = through(memoryview(values)[::2])
        copied = found.copy()
        self.assertEqual((copied.shape, copied.strides), ((3,), (2,)))
        values[2] = 7
        self.assertEqual(ctypes.c_int.from_address(copied.data_ptr + 8).value, 2)

    def test_what_can_not_be_handed_out_is_told(self):
        found, read_only = through(memoryview(array.array("i", range(6)))[::2]), through(memoryview(b"abc").cast("b"))
        for call, part in ((found.buffer, "strides"), (lambda: found.__dlpack__(dl_device=(2, 0)), "not (2, 0)"),
                           (lambda: found.__dlpack__(stream=5), "stream"), (read_only.__dlpack__, "read-only")):
            with self.assertRaisesRegex(BufferError, part.replace("(", r"\(").replace(")", r"\)")):
                call()
        self.assertTrue(read_only.buffer().readonly)
        self.assertFalse(through(floats(1)).buffer().readonly)

    def test_a_capsule_says_what_it_is(self):
        found, read_only = through(floats(1)), through(memoryview(b"abc").cast("b"))
        for tensor, options, flags in ((found, {}, 0), (found, {"copy": True}, abi.STG_TENSOR_IS_COPIED), (read_only, {}, abi.STG_TENSOR_READ_ONLY)):
            capsule = tensor.__dlpack__(max_version=(1, 0), **options)
            view = abi.stg_tensor.from_address(tensors._capsule_pointer(capsule, tensors._VERSIONED))
            self.assertEqual((view.flags, view.view.data == tensor.data_ptr), (flags, "copy" not in options))

    def test_a_buffer_that_is_no_tensor_is_refused(self):
        class Record(ctypes.Structure):
            _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]

        with self.assertError(Code.INVALID_ARGUMENT, "/x", "format"):
            Tree({"x": (Record * 2)()})


@unittest.skipUnless(numpy, "no NumPy")
class Arrays(Case):
    def test_numpy_arrays_go_through_without_a_copy(self):
        for values in (numpy.arange(6.0).reshape(2, 3), numpy.arange(6, dtype=numpy.int64)[::2], numpy.zeros((0, 3), numpy.float32),
                       numpy.array(3, numpy.uint8), numpy.arange(6.0).reshape(2, 3).T, numpy.array([True, False])):
            found = through(values)
            self.assertEqual((found.shape, found.dtype, found.data_ptr), (values.shape, str(values.dtype), values.ctypes.data))
            back = found.numpy()
            self.assertEqual((back.ctypes.data, back.strides if back.size else 0), (values.ctypes.data, values.strides if back.size else 0))
            self.assertTrue((back == values).all())

    def test_an_array_lives_until_its_last_user_lets_go_on_whatever_thread(self):
        values = numpy.zeros(1000)
        dead = weakref.ref(values)
        tree = Tree({"x": values})
        del values
        self.assertIsNotNone(dead())
        thread = threading.Thread(target=lambda: tree.abi.release(tree.abi))
        thread.start()
        thread.join()
        self.assertIsNone(dead())

    def test_an_array_lives_as_long_as_what_came_out(self):
        values = numpy.arange(3.0)
        dead = weakref.ref(values)
        found = through(values).numpy()
        del values
        self.assertEqual(found.tolist(), [0, 1, 2])
        self.assertIsNotNone(dead())
        del found
        self.assertIsNone(dead())

    def test_a_dtype_that_no_tensor_has_is_refused_with_its_place(self):
        for values in (numpy.array(["a"]), numpy.array([object()]), numpy.array(["2020-01-01"], "datetime64[D]")):
            with self.assertError(Code.INVALID_ARGUMENT, "batch/x", "numpy.ndarray"):
                Tree({"x": values}, where="batch")

    def test_numpy_scalars_are_numbers(self):
        self.assertEqual(through([numpy.int32(4), numpy.float32(0.5), numpy.float64(2)]), [4, 0.5, 2.0])

    def test_a_library_from_before_dlpack_1_is_understood(self):
        values = numpy.arange(3.0)

        class Old:
            def __dlpack__(self, stream=None):
                return values.__dlpack__()

            def __dlpack_device__(self):
                return 1, 0

        found = through(Old())
        self.assertEqual(found.data_ptr, values.ctypes.data)

        class Wrapped(Old):
            def __dlpack__(self, stream=None, **_):
                return found.__dlpack__()

        self.assertEqual(numpy.from_dlpack(Wrapped()).ctypes.data, values.ctypes.data)

    def test_a_capsule_that_nobody_uses_is_let_go(self):
        found = through(numpy.arange(3.0))
        for version in (None, (1, 0)):
            capsule = found.__dlpack__(max_version=version)
            self.assertEqual(len(tensors._held), 1)
            del capsule
            self.assertEqual(len(tensors._held), 0)


class Errors(Case):
    def test_an_exception_comes_back_as_the_cause(self):
        for raised, code in ((ValueError("odd"), Code.INVALID_ARGUMENT), (MemoryError(), Code.RESOURCE_EXHAUSTED), (KeyError("k"), Code.OUT_OF_RANGE),
                             (FileNotFoundError("f"), Code.NOT_FOUND), (PermissionError("p"), Code.PERMISSION_DENIED), (TypeError("t"), Code.INVALID_ARGUMENT),
                             (NotImplementedError("n"), Code.UNIMPLEMENTED), (RuntimeError("r"), Code.UNKNOWN), (Error(Code.DATA_LOSS, "d"), Code.DATA_LOSS)):
            with self.assertError(code) as caught:
                errors.check(errors.give_error(raised))
            self.assertIs(caught.exception.cause, raised)

    def test_what_ends_a_program_ends_it(self):
        with self.assertRaises(KeyboardInterrupt):
            errors.check(errors.give_error(KeyboardInterrupt()))

    def test_a_chain_of_causes_is_kept_with_its_places(self):
        inner = abi.stg_error.from_address(errors.give_error(ValueError("inner")))
        released = []
        release = dict(abi.stg_error._fields_)["release"](lambda error: released.append(error.contents.cause.contents.release(error.contents.cause)))
        outer = abi.stg_error(code=13, flags=abi.STG_ERROR_RETRYABLE, replica=1, rank=-1, device=abi.stg_device(1, 1), message=errors.text("outer"),
                              cause=ctypes.pointer(inner), release=release)
        with self.assertError(Code.INTERNAL, "outer") as caught:
            errors.check(ctypes.addressof(outer))
        error = caught.exception
        self.assertEqual((error.replica, error.rank, error.device, error.retryable, error.instance_usable), (1, None, (1, 1), True, False))
        self.assertIsInstance(error.cause, ValueError)
        self.assertEqual(len(released), 1)


if __name__ == "__main__":
    unittest.main()
