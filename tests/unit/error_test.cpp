// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <cstdlib>
#include <filesystem>
#include <new>
#include <optional>
#include <stdexcept>

#include "base/value.hpp"
#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// While true, this thread's operator new has no memory.
thread_local bool out_of_memory = false;

// An error as another party makes it: it counts its releases, and releases its cause itself.
struct ForeignError {
  explicit ForeignError(const char* text, ForeignError* because = nullptr) {
    error.code = STG_NOT_FOUND;
    error.flags = STG_ERROR_RETRYABLE;
    error.replica = 3;
    error.rank = 5;
    error.device = {STG_DEVICE_CUDA, 1};
    error.message = {text, std::string_view(text).size()};
    error.cause = because == nullptr ? nullptr : &because->error;
    error.release = [](stg_error* self) {
      ++static_cast<ForeignError*>(self->owner)->num_releases;
      if (self->cause != nullptr) self->cause->release(self->cause);
    };
    error.owner = this;
  }
  stg_error error{};
  int num_releases = 0;
};

std::string text_of(const stg_error& error) { return std::string(stratagem::text_of(error.message)); }

}  // namespace

thread_local uint64_t stratagem::test::num_allocations = 0;

// Both kinds: with one of them left, a sanitizer's would be paired with ours.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++num_allocations;
  return out_of_memory ? nullptr : std::malloc(size == 0 ? 1 : size);
}
void* operator new(std::size_t size) {
  void* memory = operator new(size, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

TEST_CASE("an error crosses the ABI and back with all its parts") {
  Error thrown{STG_DATA_LOSS, "the file x is cut off"};
  thrown.flags = STG_ERROR_INSTANCE_DRAINING;
  thrown.replica = 2;
  thrown.rank = 7;
  thrown.device = {STG_DEVICE_CUDA, 4};

  const Error received = error_of([&] { check(guard([&] { throw thrown; })); });
  CHECK(received.code == STG_DATA_LOSS);
  CHECK(received.flags == STG_ERROR_INSTANCE_DRAINING);
  CHECK(received.replica == 2);
  CHECK(received.rank == 7);
  CHECK(received.device.kind == STG_DEVICE_CUDA);
  CHECK(received.device.index == 4);
  CHECK(received.message == "the file x is cut off");
  CHECK(received.cause == nullptr);
}

TEST_CASE("an error's text crosses the ABI as UTF-8, whatever bytes of a file or a path it quotes") {
  const auto crossed = [](const std::string& text) {
    const ErrorPtr error{to_abi(data_loss(text))};
    return std::string(error->message.data, error->message.size_bytes);
  };
  for (const char* fine : {"", "the key 'a\"\\\n'", "der Schl\xc3\xbcssel \xf0\x9f\x94\x91", "no\x01control"})
    CHECK(crossed(fine) == fine);
  CHECK(crossed("the key '\xff\xc3' of \xc3\xbc") == "the key '\xef\xbf\xbd\xef\xbf\xbd' of \xc3\xbc");
  CHECK(crossed("cut \xe2\x82") == "cut \xef\xbf\xbd");
}

TEST_CASE("an error is by default of no replica, rank or device, and leaves the instance usable") {
  const ErrorPtr error{to_abi(invalid_argument("lr is ", -1))};
  CHECK(text_of(*error) == "lr is -1");
  CHECK(error->flags == STG_ERROR_INSTANCE_USABLE);
  CHECK(error->replica == -1);
  CHECK(error->rank == -1);
  CHECK(error->device.kind == STG_DEVICE_NONE);
  CHECK(error->device.index == -1);
}

TEST_CASE("success crosses as null, and null as success") {
  CHECK(guard([] {}) == nullptr);
  check(nullptr);
}

TEST_CASE("another party's error is released once, when nobody needs it or its causes any more") {
  ForeignError disk{"disk full"};
  ForeignError save{"save failed", &disk};
  {
    std::optional<Error> outermost;
    {
      const Error received = error_of([&] { check(&save.error); });
      CHECK(received.message == "save failed");
      REQUIRE(received.cause.get() == &disk.error);
      const Error copy = received;
      CHECK(copy.cause.get() == &disk.error);
      outermost = received.within("fit", 1, {STG_DEVICE_CPU, 1});
    }
    CHECK(save.num_releases == 0);
    const ErrorPtr again{to_abi(*outermost)};
    CHECK(text_of(*again) == "fit: save failed");
    REQUIRE(again->cause != nullptr);
    CHECK(text_of(*again->cause) == "save failed");
    CHECK(again->cause == &save.error);  // the very object, not a copy of its text
    CHECK(again->cause->cause == &disk.error);
    outermost.reset();
    CHECK(save.num_releases == 0);
  }
  CHECK(save.num_releases == 1);
  CHECK(disk.num_releases == 1);
}

TEST_CASE("within names the context, the replica and the device, and keeps code and flags") {
  Error inner{STG_RESOURCE_EXHAUSTED, "no memory"};
  inner.flags = STG_ERROR_RETRYABLE | STG_ERROR_INSTANCE_USABLE;
  inner.rank = 9;
  const Error outer = inner.within("replica 1 on cpu:1", 1, {STG_DEVICE_CPU, 1});
  CHECK(outer.code == STG_RESOURCE_EXHAUSTED);
  CHECK(outer.flags == inner.flags);
  CHECK(outer.message == "replica 1 on cpu:1: no memory");
  CHECK(outer.replica == 1);
  CHECK(outer.rank == 9);
  CHECK(outer.device.index == 1);
  REQUIRE(outer.cause != nullptr);
  CHECK(text_of(*outer.cause) == "no memory");
  CHECK(outer.cause->replica == -1);
}

TEST_CASE("an error never crosses as success") {
  const ErrorPtr error{to_abi(Error{STG_OK, "nothing wrong"})};
  CHECK(error->code == STG_UNKNOWN);
}

TEST_CASE("a foreign error with a null message reads as an empty one, and an unknown code stays") {
  ForeignError odd{""};
  odd.error.message = {nullptr, 0};
  odd.error.code = 4711;
  const Error received = error_of([&] { check(&odd.error); });
  CHECK(received.message.empty());
  CHECK(received.code == 4711);
  CHECK(received.origin.get() == &odd.error);
  CHECK(code_name(4711) == "4711");
}

TEST_CASE("what is thrown decides the code") {
  const auto code_and_text = [](const auto& body) {
    const ErrorPtr error{guard(body)};
    return code_name(error->code) + ": " + text_of(*error);
  };
  CHECK(code_and_text([] { throw std::bad_alloc(); }) == "RESOURCE_EXHAUSTED: out of memory");
  CHECK(code_and_text([] { throw std::runtime_error("broken"); }) == "INTERNAL: broken");
  const std::string too_long(300, 'x');
  CHECK(code_and_text([&] { static_cast<void>(std::filesystem::is_directory("/" + too_long)); }) ==
        "INVALID_ARGUMENT: can't use /" + too_long + ": File name too long");
  CHECK(code_and_text([] { throw 42; }) == "UNKNOWN: an exception that is no std::exception was thrown");
  CHECK(code_and_text([] { throw not_found("no x"); }) == "NOT_FOUND: no x");
  CHECK(code_and_text([] { throw failed_precondition("not now"); }) == "FAILED_PRECONDITION: not now");
  CHECK(code_and_text([] { throw unimplemented("not yet"); }) == "UNIMPLEMENTED: not yet");
  CHECK(code_and_text([] { throw data_loss("cut off"); }) == "DATA_LOSS: cut off");
  CHECK(code_and_text([] { throw internal("a bug"); }) == "INTERNAL: a bug");
}

TEST_CASE("the translator is asked about exceptions that base does not know, and only those") {
  struct Restore {
    ExceptionTranslator saved = translate_foreign_exception;
    ~Restore() { translate_foreign_exception = saved; }
  } restore;
  translate_foreign_exception = [](const std::exception_ptr& exception) -> Error {
    try {
      std::rethrow_exception(exception);
    } catch (const std::out_of_range& error) {
      return {STG_OUT_OF_RANGE, error.what()};
    }
  };
  CHECK(ErrorPtr { guard([] { throw std::out_of_range("row 9"); }) } -> code == STG_OUT_OF_RANGE);
  CHECK(ErrorPtr { guard([] { throw std::runtime_error("other"); }) } -> code == STG_INTERNAL);
  CHECK(ErrorPtr { guard([] { throw 42; }) } -> code == STG_UNKNOWN);
  CHECK(ErrorPtr { guard([] { throw not_found("ours"); }) } -> code == STG_NOT_FOUND);
}

TEST_CASE("without memory for an error there is a static one, whose release may be called any number of times") {
  const Error long_one{STG_DATA_LOSS, std::string(200, 'x')};
  out_of_memory = true;
  stg_error* first = to_abi(long_one);
  stg_error* second = to_abi(long_one);
  out_of_memory = false;
  REQUIRE(first != nullptr);
  CHECK(first == second);
  CHECK(first->code == STG_RESOURCE_EXHAUSTED);
  first->release(first);
  first->release(first);
  CHECK(text_of(*second) == "out of memory on the host while another error was being reported");
}

TEST_CASE("without memory to describe an exception it is resource_exhausted, and the process goes on") {
  const std::string long_text(200, 'x');
  for (const std::exception_ptr& exception :
       {std::make_exception_ptr(Error{STG_DATA_LOSS, long_text}), std::make_exception_ptr(std::runtime_error(long_text)),
        std::make_exception_ptr(std::bad_alloc()), std::make_exception_ptr(42)}) {
    out_of_memory = true;
    stg_error* error = guard([&] { std::rethrow_exception(exception); });
    const Error described = describe_exception(exception);
    out_of_memory = false;
    REQUIRE(error != nullptr);
    CHECK(error->code == STG_RESOURCE_EXHAUSTED);
    CHECK(described.message == "out of memory");
    error->release(error);
  }
}

TEST_CASE("another party's error is the cause of what crosses the ABI, and of its flags only RETRYABLE is handed on") {
  for (const uint32_t flags : {0u, STG_ERROR_INSTANCE_DRAINING, STG_ERROR_RETRYABLE | STG_ERROR_INSTANCE_DRAINING}) {
    ForeignError storage{"disk full"};
    storage.error.flags = flags;
    const uint32_t expected = STG_ERROR_INSTANCE_USABLE | (flags & STG_ERROR_RETRYABLE);
    {
      const ErrorPtr told{guard([&] { check(&storage.error); })};
      CHECK(told->cause == &storage.error);
      CHECK(text_of(*told) == "disk full");
      CHECK(told->flags == expected);
      CHECK(told->release != storage.error.release);
    }
    CHECK(storage.num_releases == 1);
    storage.num_releases = 0;
    const Error received = error_of([&] { check(&storage.error); });
    CHECK(received.flags == flags);  // to whoever called, they are news
    CHECK(received.within("saving", 0, no_device).flags == expected);
  }
}

TEST_CASE("codes have the names of gRPC") {
  CHECK(code_name(STG_OK) == "OK");
  CHECK(code_name(STG_INVALID_ARGUMENT) == "INVALID_ARGUMENT");
  CHECK(code_name(STG_UNAUTHENTICATED) == "UNAUTHENTICATED");
  CHECK(code_name(17) == "17");
}
