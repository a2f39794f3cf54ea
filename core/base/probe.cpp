// SPDX-License-Identifier: Apache-2.0
//
// The door of a plugin: version negotiation, and the tables behind it. Nothing here allocates or starts anything.
#include <cstdio>
#include <cstring>

#include "base/strategy.hpp"

namespace stratagem::sdk {

namespace {

// The one minor of major 1 that these sources know.
constexpr uint32_t min_minor = STG_ABI_MINOR;
constexpr uint32_t max_minor = STG_ABI_MINOR;

// What every answer but a bad argument begins with.
void begin_reply(stg_probe_reply& reply) {
  reply.abi_major = STG_ABI_MAJOR;
  reply.min_minor = min_minor;
  reply.max_minor = max_minor;
  reply.minor = 0;
  reply.plugin = nullptr;
  reply.text_size_bytes = 0;
}

// NUL-terminated, cut to the host's buffer, the whole size told.
void write_text(stg_probe_reply& reply, std::string_view text) {
  reply.text_size_bytes = text.size() + 1;
  if (reply.text == nullptr || reply.text_capacity_bytes == 0) return;
  const uint64_t fits = std::min<uint64_t>(text.size(), reply.text_capacity_bytes - 1);
  std::memcpy(reply.text, text.data(), fits);
  reply.text[fits] = '\0';
}

void explain(const stg_probe_request& request, stg_probe_reply& reply, const stg_plugin& plugin) {
  char text[512];
  const int length = std::snprintf(
      text, sizeof text, "plugin %.*s %.*s is built for ABI %u.%u to %u.%u; this host (%.*s) speaks %u.%u to %u.%u: use a %s",
      static_cast<int>(plugin.name.size_bytes), plugin.name.data, static_cast<int>(plugin.version.size_bytes),
      plugin.version.data, STG_ABI_MAJOR, min_minor, STG_ABI_MAJOR, max_minor,
      static_cast<int>(std::min<uint64_t>(request.host_name.size_bytes, 64)),
      request.host_name.data == nullptr ? "" : request.host_name.data, request.abi_major, request.min_minor, request.abi_major,
      request.max_minor,
      request.abi_major > STG_ABI_MAJOR || (request.abi_major == STG_ABI_MAJOR && request.min_minor > max_minor)
          ? "plugin built against this host's ABI"
          : "newer host, or a plugin built against this host's ABI");
  write_text(reply, {text, static_cast<size_t>(std::min<int>(length, sizeof text - 1))});
}

}  // namespace

uint32_t answer_probe(const stg_probe_request* request, stg_probe_reply* reply, const stg_plugin& plugin) noexcept {
  if (request == nullptr || reply == nullptr || request->min_minor > request->max_minor || request->reserved != 0 ||
      (request->host_name.data == nullptr && request->host_name.size_bytes != 0)) {
    return STG_PROBE_BAD_ARGUMENT;
  }
  begin_reply(*reply);
  if (request->abi_major != STG_ABI_MAJOR || request->min_minor > max_minor || request->max_minor < min_minor) {
    explain(*request, *reply, plugin);
    return STG_PROBE_REFUSED;
  }
  reply->minor = std::min(request->max_minor, max_minor);
  reply->plugin = &plugin;
  return STG_PROBE_ACCEPTED;
}

uint32_t refuse_probe(stg_probe_reply* reply, const char* name) noexcept {
  if (reply == nullptr) return STG_PROBE_BAD_ARGUMENT;
  const Error error = describe_exception(std::current_exception());
  begin_reply(*reply);
  char text[512];
  const int length = std::snprintf(text, sizeof text, "plugin %s can't say what it is: %s", name, error.what());
  write_text(*reply, {text, static_cast<size_t>(std::min<int>(length, sizeof text - 1))});
  return STG_PROBE_REFUSED;
}

StrategyPlugin::StrategyPlugin(const char* name, const char* version, const StrategyInfo& described,
                               decltype(stg_strategy_api::create) create, bool can_save)
    : info(described),
      api(strategy_table(create)),
      factory(sized<stg_strategy_factory>()),
      factories{&factory},
      plugin(sized<stg_plugin>()) {
  if (!can_save) api.save = nullptr;
  factory.name = to_abi(std::string_view(name));
  factory.summary = to_abi(std::string_view(info.summary));
  factory.options_schema = to_abi(std::string_view(info.options_schema));
  factory.device_kinds = info.device_kinds.data();
  factory.num_device_kinds = static_cast<uint64_t>(
      std::count_if(info.device_kinds.begin(), info.device_kinds.end(), [](uint32_t kind) { return kind != STG_DEVICE_NONE; }));
  factory.capabilities = info.capabilities;
  factory.api = &api;
  plugin.name = factory.name;
  plugin.version = to_abi(std::string_view(version));
  plugin.strategies = factories;
  plugin.num_strategies = 1;
  plugin.get_extension = [](stg_string) -> const void* { return nullptr; };
}

}  // namespace stratagem::sdk
