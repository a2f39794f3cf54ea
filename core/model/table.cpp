// SPDX-License-Identifier: Apache-2.0
//
// stg_model for a TensorModel: the functions of the ABI, each a line or two around what replica, step and gradients do.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/structs.hpp"
#include "model/autocast.hpp"
#include "model/gradients.hpp"
#include "model/replica.hpp"
#include "model/scope.hpp"
#include "model/step.hpp"
#include "torch/errors.hpp"
#include "torch/runtime/deterministic.hpp"

namespace stratagem::sdk {

namespace {

// The model behind `self`.
struct SharedModel {
  stg_model table;
  std::atomic<int64_t> num_references{1};
  const char* name;
  ModelClass model_class;
  nlohmann::json options;
  Host host;
};

// The replica behind stg_replica.
struct ReplicaWithGradients {
  ModelReplica replica;
  GradientReporter gradients;

  ReplicaWithGradients(const SharedModel& model, const stg_replicate_args& args)
      : replica(model.name, model.model_class.construct, model.options, model.host, args), gradients(replica) {}
};

SharedModel& model_of(void* self) { return *static_cast<SharedModel*>(self); }
ReplicaWithGradients& of(stg_replica* replica) { return *reinterpret_cast<ReplicaWithGradients*>(replica); }
ModelReplica& replica_of(stg_replica* replica) {
  if (replica == nullptr) throw invalid_argument("the replica is null");
  return of(replica).replica;
}
Graph* graph_of(stg_graph* graph) { return reinterpret_cast<Graph*>(graph); }

// As guard, and the error tells the replica and its device. The calling thread may be the host's, in modes of its own: what the SDK
// does with tensors is done in none of them; a step sets its own.
template <class Body>
stg_error* guard_replica(stg_replica* replica, Body&& body) noexcept {
  try {
    ModelReplica& own = replica_of(replica);
    const GradientScope gradients(GradientScope::Mode::record);
    const AutocastScope autocast(own.device().type(), std::nullopt, false);
    body(own);
    return nullptr;
  } catch (...) {
    Error error = describe_exception(std::current_exception());
    if (replica != nullptr) {
      error.replica = replica_of(replica).index();
      error.device = replica_of(replica).abi_device();
    }
    return to_abi(error);
  }
}

void retain(void* self) { model_of(self).num_references.fetch_add(1, std::memory_order_relaxed); }

void release(void* self) {
  if (model_of(self).num_references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete &model_of(self);
}

stg_error* replicate(void* self, const stg_replicate_args* args, stg_replica** out) {
  return guard([&] {
    const auto given = read_argument(args, STG_REPLICATE_ARGS_MIN_SIZE, "stg_replicate_args");
    *out = reinterpret_cast<stg_replica*>(new ReplicaWithGradients(model_of(self), given));
  });
}

void destroy_replica(void*, stg_replica* replica) { delete &of(replica); }

stg_error* describe(void*, stg_replica* replica, stg_model_description* out) {
  return guard_replica(replica, [&](ModelReplica& own) {
    known_size_bytes(out, STG_MODEL_DESCRIPTION_MIN_SIZE, "stg_model_description");
    write_result(out, own.describe());
  });
}

stg_error* set_mode(void*, stg_replica* replica, uint32_t train) {
  return guard_replica(replica, [&](ModelReplica& own) {
    if (train > 1) throw invalid_argument("mode ", train, "; there are 0 (evaluation) and 1 (training)");
    own.set_training(train == 1);
  });
}

stg_error* step(void*, stg_replica* replica, const stg_step_context* context, stg_tree* batch, stg_model_step_result* result) {
  Tree owned = Tree::receive(batch);  // first: it is consumed whatever happens
  return guard_replica(replica, [&](ModelReplica& own) {
    const auto given = read_argument(context, STG_STEP_CONTEXT_MIN_SIZE, "stg_step_context");
    known_size_bytes(result, STG_MODEL_STEP_RESULT_MIN_SIZE, "stg_model_step_result");
    StepResult done = run_step(own, given, std::move(owned));
    auto told = sized<stg_model_step_result>();
    told.outputs = done.outputs.give();
    told.denominator = done.denominator;
    static_cast<void>(done.denominator_owner.release());
    told.graph = reinterpret_cast<stg_graph*>(done.graph.release());
    write_result(result, told);
  });
}

stg_error* backward(void*, stg_replica* replica, stg_graph* graph, double scale, uint32_t flags, const stg_gradient_sink* sink) {
  const std::unique_ptr<Graph> owned(graph_of(graph));
  return guard_replica(replica, [&](ModelReplica& own) {
    if (owned == nullptr) throw invalid_argument("the graph is null");
    if (flags != 0) throw unimplemented("backward flags ", flags, "; none are defined");
    const auto functions = read_table(sink, STG_GRADIENT_SINK_MIN_SIZE, "stg_gradient_sink");
    if (functions.ready == nullptr) throw invalid_argument("stg_gradient_sink.ready is null");
    const ThreadScope thread(own.host(), own.num_threads());
    const StreamScope stream(own.device(), owned->stream);
    const ReplicaGenerators::Scope generators(own.generators());
    const DeterministicScope deterministic((owned->flags & STG_STEP_DETERMINISTIC) != 0);
    of(replica).gradients.run(owned->loss, scale, functions, (owned->flags & STG_STEP_DETECT_ANOMALY) != 0);
  });
}

void release_graph(void*, stg_replica*, stg_graph* graph) { delete graph_of(graph); }

stg_error* bind(void*, stg_replica* replica, uint64_t index, const stg_tensor* storage, const stg_tensor* gradient) {
  return guard_replica(replica, [&](ModelReplica& own) {
    if (storage == nullptr) throw invalid_argument("the storage to bind is null");
    own.bind(index, *storage, gradient);
  });
}

stg_error* parameters_changed(void*, stg_replica*) { return nullptr; }  // nothing is derived from parameters between steps

// Both take their tensors over, so that what comes out may view what came in.
TensorTree imported(Tree tree, ReadOnly& read_only) {
  validate(tree.root(), "batch");
  return import_tree(std::move(tree), std::nullopt, read_only);
}

stg_tree exported(const TensorTree& tree, const ReadOnly& read_only) {
  Tree out = export_tree(tree, nullptr);
  for_each_leaf(out.root(), [&](const KeyPath&, stg_value& leaf) {
    if (leaf.type == STG_TENSOR && !read_only.empty()) leaf.as.tensor->flags |= STG_TENSOR_READ_ONLY;
  });
  return out.give();
}

stg_error* split(void*, stg_replica* replica, const stg_tree* batch, uint64_t num_shares, stg_tree* shares,
                 uint64_t* num_filled) {
  return guard_replica(replica, [&](ModelReplica& own) {
    ReadOnly read_only;
    const TensorTree whole = imported(copy_tree(batch->root), read_only);
    const std::vector<TensorTree> made = own.model().split(Batch(whole, "split: batch"), num_shares);
    if (made.empty() || made.size() > num_shares)
      throw invalid_argument("split gave ", made.size(), " shares; 1 to ", num_shares, " are possible");
    std::vector<Tree> ready;
    for (const TensorTree& share : made) ready.emplace_back(exported(share, read_only));
    for (size_t i = 0; i < ready.size(); ++i) shares[i] = ready[i].give();
    *num_filled = ready.size();
  });
}

stg_error* transfer(void*, stg_replica* replica, stg_tree* batch, int64_t dataloader_index, stg_tree* out) {
  Tree owned = Tree::receive(batch);
  return guard_replica(replica, [&](ModelReplica& own) {
    if (owned.borrowed()) owned = copy_tree(owned.root());
    ReadOnly read_only;
    const TensorTree share = imported(std::move(owned), read_only);
    *out = exported(own.model().transfer(Batch(share, "transfer: batch"), own.device(), dataloader_index), read_only);
  });
}

stg_error* synchronize(void*, stg_replica* replica) {
  return guard_replica(replica, [](ModelReplica& own) {
    if (!own.device().is_cpu()) c10::impl::VirtualGuardImpl(own.device().type()).getStream(own.device()).synchronize();
  });
}

stg_error* get_generator_state(void*, stg_replica* replica, stg_tree* out) {
  return guard_replica(replica, [&](ModelReplica& own) { *out = make_tree(Bytes{own.generators().state()}).give(); });
}

stg_error* set_generator_state(void*, stg_replica* replica, const uint8_t* state, uint64_t size_bytes) {
  return guard_replica(replica, [&](ModelReplica& own) {
    if (state == nullptr) throw invalid_argument("the generator state is null");
    own.generators().set_state({state, size_bytes});
  });
}

stg_model table_for(SharedModel* self) {
  auto table = sized<stg_model>();
  table.self = self;
  table.retain = &retain;
  table.release = &release;
  table.replicate = &replicate;
  table.destroy_replica = &destroy_replica;
  table.describe = &describe;
  table.set_mode = &set_mode;
  table.step = &step;
  table.backward = &backward;
  table.release_graph = &release_graph;
  table.bind = &bind;
  table.parameters_changed = &parameters_changed;
  if (self->model_class.has_split) table.split = &split;
  if (self->model_class.has_transfer) table.transfer = &transfer;
  table.synchronize = &synchronize;
  table.get_generator_state = &get_generator_state;
  table.set_generator_state = &set_generator_state;
  return table;
}

}  // namespace

stg_error* create_model(const char* name, ModelClass model_class, stg_string options_json, const stg_host* host,
                        const stg_model** out) noexcept {
  initialise_torch();
  return guard([&] {
    if (out == nullptr) throw invalid_argument("the place for the model is null");
    auto model = std::make_unique<SharedModel>();
    model->name = name;
    model->model_class = model_class;
    const std::string where = concat("options of model '", name, "'");
    model->options = parse_json(options_json.size_bytes == 0 ? std::string_view("{}") : text_of(options_json), where);
    if (!model->options.is_object()) throw invalid_argument(where, ": ", shortened(model->options.dump()), " is no object");
    model->host = Host(host);
    model->table = table_for(model.get());
    *out = &model.release()->table;
  });
}

}  // namespace stratagem::sdk
