// SPDX-License-Identifier: Apache-2.0
//! The functions of the table. Each reads its arguments, goes through `entry::owner`, and writes its results last: on an error outputs are
//! untouched.
use crate::abi::*;
use crate::entry::*;
use crate::error::*;
use crate::state;
use crate::strategy::{CPU, Config, Step, Strategy, no_update};
use crate::tree::{Tree, bytes, slice};
use std::ptr;
use std::sync::atomic::Ordering;

const LIVE: u32 = STG_STATE_CREATED | STG_STATE_FIT | STG_STATE_EVALUATE | STG_STATE_MODELLESS;
const MODEL: u32 = STG_STATE_FIT | STG_STATE_EVALUATE;

type Raw = *mut stg_strategy;
type Answer = *mut stg_error;

/// A function that a strategy doesn't have may be null; here each says so in words.
pub static API: stg_strategy_api = stg_strategy_api {
    struct_size: size_of::<stg_strategy_api>() as u64,
    create: Some(create),
    destroy: Some(destroy),
    abort: Some(abort),
    status: Some(status),
    devices: Some(devices),
    ranks: Some(ranks),
    setup: Some(setup),
    teardown: Some(teardown),
    describe_parameters: Some(describe_parameters),
    model_to_device: Some(model_to_device),
    batch_to_device: Some(batch_to_device),
    broadcast: Some(broadcast),
    all_gather: Some(all_gather),
    reduce: Some(reduce),
    reduce_boolean_decision: Some(reduce_boolean_decision),
    barrier: Some(barrier),
    to_host: Some(to_host),
    announce_batch: Some(announce_batch),
    training_step: Some(training_step),
    backward: Some(backward),
    optimizer_step: Some(optimizer_step),
    train_batch: Some(train_batch),
    zero_grad: Some(zero_grad),
    gradients: Some(gradients),
    parameters_changed: Some(parameters_changed),
    validation_step: Some(validation_step),
    test_step: Some(test_step),
    predict_step: Some(predict_step),
    reduce_gradients: Some(reduce_gradients),
    export_state: Some(export_state),
    import_state: Some(import_state),
    save: None, // it writes no files; with a null slot a host knows before it trains
    load: Some(load),
};

// ---- life

unsafe extern "C" fn create(args: *const stg_create_args, out: *mut Raw) -> Answer {
    guard(|| unsafe {
        check_fork()?;
        let args = read(args, STG_CREATE_ARGS_MIN_SIZE, "create_args")?;
        if out.is_null() {
            return invalid("out is null");
        }
        if args.flags & !u64::from(STG_CREATE_CALLER_THREAD_ONLY) != 0 {
            return unimplemented(format!("create_args.flags is {}; only 1 is known here", args.flags));
        }
        let Ok(json) = std::str::from_utf8(bytes(args.config_json.data.cast(), args.config_json.size_bytes)) else {
            return invalid("the config is no UTF-8");
        };
        *out = Instance::create(Strategy::new(Config::read(json)?, args.flags != 0));
        Ok(())
    })
}

unsafe extern "C" fn destroy(this: Raw) {
    unsafe { Instance::destroy(this) };
}

unsafe extern "C" fn abort(this: Raw) {
    if let Ok(instance) = unsafe { Instance::of(this) } {
        instance.abort();
    }
}

unsafe extern "C" fn status(this: Raw, out: *mut stg_status) -> Answer {
    guard(|| unsafe {
        let instance = Instance::of(this)?;
        check_out(out, STG_STATUS_MIN_SIZE, "status")?;
        let state = instance.state.load(Ordering::Acquire);
        let mut made: stg_status = std::mem::zeroed();
        (made.state, made.stage) = (state, if state == STG_STATE_EVALUATE { STG_STAGE_VALIDATE } else { STG_STAGE_FIT });
        made.num_micro_batches = instance.num_micro_batches.load(Ordering::Acquire);
        made.num_updates = instance.num_updates.load(Ordering::Acquire);
        made.has_graph = instance.has_graph.load(Ordering::Acquire).into();
        write(out, made);
        Ok(())
    })
}

unsafe extern "C" fn devices(this: Raw, out: *mut *const stg_device, num_devices: *mut u64) -> Answer {
    guard(|| unsafe {
        Instance::of(this)?;
        if out.is_null() || num_devices.is_null() {
            return invalid("an output of devices is null");
        }
        static DEVICES: [stg_device; 1] = [CPU];
        (*out, *num_devices) = (DEVICES.as_ptr(), 1);
        Ok(())
    })
}

unsafe extern "C" fn ranks(this: Raw, out: *mut stg_ranks) -> Answer {
    guard(|| unsafe {
        Instance::of(this)?;
        check_out(out, STG_RANKS_MIN_SIZE, "ranks")?;
        let mut made: stg_ranks = std::mem::zeroed();
        made.world_size = 1;
        write(out, made);
        Ok(())
    })
}

unsafe extern "C" fn setup(this: Raw, call: *const stg_call, args: *const stg_setup_args) -> Answer {
    guard(|| unsafe {
        let args = read(args, STG_SETUP_ARGS_MIN_SIZE, "setup_args")?;
        let state = if args.state.is_null() { None } else { Some(Tree::take(args.state, "state")?) };
        if args.stage > STG_STAGE_PREDICT.into() {
            return invalid(format!("setup_args.stage is {}; known are 0 to 3", args.stage));
        }
        owner(this, "setup", STG_STATE_CREATED, call, |instance, strategy, call| {
            if args.model.is_null() {
                instance.state.store(STG_STATE_MODELLESS, Ordering::Release);
                return Ok(());
            }
            let is_fit = args.stage == u64::from(STG_STAGE_FIT);
            strategy.setup(args.model)?;
            instance.check_time_after_model(call).inspect_err(|_| strategy.teardown())?;
            let mut num_updates = 0;
            if let Some(state) = state {
                match strategy.model().and_then(|model| state::import(model, &state, true, is_fit)) {
                    Ok((updates, _)) => num_updates = updates.unwrap_or(0),
                    Err(error) => {
                        strategy.teardown();
                        return Err(error);
                    }
                }
            }
            instance.num_updates.store(num_updates, Ordering::Release);
            instance.state.store(if is_fit { STG_STATE_FIT } else { STG_STATE_EVALUATE }, Ordering::Release);
            Ok(())
        })
    })
}

unsafe extern "C" fn teardown(this: Raw, call: *const stg_call) -> Answer {
    guard(|| unsafe {
        owner(this, "teardown", LIVE, call, |instance, strategy, call| {
            strategy.clear(instance);
            strategy.teardown();
            instance.check_time_after_model(call)?;
            instance.num_updates.store(0, Ordering::Release);
            instance.state.store(STG_STATE_CREATED, Ordering::Release);
            Ok(())
        })
    })
}

unsafe extern "C" fn describe_parameters(this: Raw, out: *mut stg_model_description) -> Answer {
    guard(|| unsafe {
        check_out(out, STG_MODEL_DESCRIPTION_MIN_SIZE, "model_description")?;
        owner(this, "describe_parameters", MODEL, ptr::null(), |_, strategy, _| {
            write(out, strategy.model()?.description);
            Ok(())
        })
    })
}

// ---- data: one device, one process

/// What comes in goes out; a copy where it was borrowed.
unsafe fn pass(this: Raw, name: &str, call: *const stg_call, object: *mut stg_tree, out: *mut stg_tree, root: bool) -> Answer {
    guard(|| unsafe {
        let object = Tree::take(object, "object")?;
        if out.is_null() {
            return invalid("out is null");
        }
        if !root {
            return invalid(format!("{name}: src must be 0; there is one process"));
        }
        owner(this, name, LIVE, call, |_, _, _| {
            *out = object.owned().into_raw();
            Ok(())
        })
    })
}

unsafe extern "C" fn model_to_device(this: Raw, call: *const stg_call) -> Answer {
    guard(|| unsafe { owner(this, "model_to_device", MODEL, call, |_, _, _| Ok(())) })
}

unsafe extern "C" fn batch_to_device(this: Raw, call: *const stg_call, args: *const stg_transfer_args, out: *mut stg_tree) -> Answer {
    let args = match unsafe { read(args, STG_TRANSFER_ARGS_MIN_SIZE, "transfer_args") } {
        Ok(args) => args,
        Err(error) => return error.into_raw(),
    };
    let known = args.device.kind == STG_DEVICE_NONE || (args.device.kind, args.device.index) == (CPU.kind, CPU.index);
    if !known {
        return guard(|| unsafe {
            drop(Tree::take(args.batch, "batch"));
            invalid(format!("transfer_args.device is {{{}, {}}}; this strategy has cpu:0", args.device.kind, args.device.index))
        });
    }
    unsafe { pass(this, "batch_to_device", call, args.batch, out, true) }
}

unsafe extern "C" fn broadcast(this: Raw, call: *const stg_call, object: *mut stg_tree, src: i32, out: *mut stg_tree) -> Answer {
    unsafe { pass(this, "broadcast", call, object, out, src == 0) }
}

unsafe extern "C" fn all_gather(this: Raw, call: *const stg_call, object: *mut stg_tree, out: *mut stg_tree) -> Answer {
    unsafe { pass(this, "all_gather", call, object, out, true) }
}

unsafe extern "C" fn to_host(this: Raw, call: *const stg_call, object: *mut stg_tree, out: *mut stg_tree) -> Answer {
    unsafe { pass(this, "to_host", call, object, out, true) }
}

unsafe extern "C" fn reduce_boolean_decision(this: Raw, call: *const stg_call, decision: u32, mode: u32, out: *mut u32) -> Answer {
    guard(|| unsafe {
        if decision > 1 || mode > STG_DECIDE_ANY || out.is_null() {
            return invalid(format!("decision {decision}, mode {mode}: 0 or 1 each, and an output"));
        }
        owner(this, "reduce_boolean_decision", LIVE, call, |_, _, _| {
            *out = decision;
            Ok(())
        })
    })
}

unsafe extern "C" fn barrier(this: Raw, call: *const stg_call, _: stg_string) -> Answer {
    guard(|| unsafe { owner(this, "barrier", LIVE, call, |_, _, _| Ok(())) })
}

// ---- steps

/// The arguments, and the batch, which is consumed from here on.
unsafe fn take_step(args: *const stg_step_args, out: *mut stg_step_result, stage: u32) -> Result<(stg_step_args, Tree, Step)> {
    unsafe {
        let args = read(args, STG_STEP_ARGS_MIN_SIZE, "step_args")?;
        if args.announced != 0 {
            return unimplemented("step_args.announced: this strategy has no announce_batch");
        }
        let batch = Tree::take(args.batch, "batch")?;
        check_out(out, STG_STEP_RESULT_MIN_SIZE, "step_result")?;
        check_flags(args.flags)?;
        let (batch_index, dataloader_index, global_step) = (args.batch_index, args.dataloader_index, args.global_step);
        Ok((args, batch, Step { stage, flags: args.flags, batch_index, dataloader_index, global_step }))
    }
}

fn check_flags(flags: u64) -> Result<()> {
    let known = STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY;
    if flags & !u64::from(known) == 0 { Ok(()) } else { unimplemented(format!("flags {flags}: only 1 and 2 are known here")) }
}

unsafe fn give(out: *mut stg_step_result, outputs: Tree, strategy: &Strategy) {
    let (outputs, weights) = (outputs.into_raw(), strategy.weights.as_ptr());
    unsafe { write(out, stg_step_result { struct_size: 0, outputs, weights, num_weights: 1 }) };
}

unsafe fn one_step(
    this: Raw,
    name: &str,
    call: *const stg_call,
    args: *const stg_step_args,
    out: *mut stg_step_result,
    stage: u32,
) -> Answer {
    guard(|| unsafe {
        let (args, batch, step) = take_step(args, out, stage)?;
        if !args.update.is_null() {
            return invalid("step_args.update is for train_batch only");
        }
        let is_fit = stage == STG_STAGE_FIT;
        owner(this, name, if is_fit { STG_STATE_FIT } else { MODEL }, call, |instance, strategy, call| {
            let made = strategy.step(instance, call, &step, batch);
            if made.is_err() && is_fit {
                strategy.clear(instance);
            }
            give(out, made?, strategy);
            Ok(())
        })
    })
}

unsafe extern "C" fn training_step(this: Raw, call: *const stg_call, args: *const stg_step_args, out: *mut stg_step_result) -> Answer {
    unsafe { one_step(this, "training_step", call, args, out, STG_STAGE_FIT) }
}

unsafe extern "C" fn validation_step(this: Raw, call: *const stg_call, args: *const stg_step_args, out: *mut stg_step_result) -> Answer {
    unsafe { one_step(this, "validation_step", call, args, out, STG_STAGE_VALIDATE) }
}

unsafe extern "C" fn test_step(this: Raw, call: *const stg_call, args: *const stg_step_args, out: *mut stg_step_result) -> Answer {
    unsafe { one_step(this, "test_step", call, args, out, STG_STAGE_TEST) }
}

unsafe extern "C" fn predict_step(this: Raw, call: *const stg_call, args: *const stg_step_args, out: *mut stg_step_result) -> Answer {
    unsafe { one_step(this, "predict_step", call, args, out, STG_STAGE_PREDICT) }
}

unsafe extern "C" fn backward(this: Raw, call: *const stg_call, flags: u64) -> Answer {
    guard(|| unsafe {
        check_flags(flags)?;
        owner(this, "backward", STG_STATE_FIT, call, |instance, strategy, call| {
            strategy.backward(instance, call).inspect_err(|_| strategy.clear(instance))
        })
    })
}

unsafe extern "C" fn optimizer_step(this: Raw, call: *const stg_call, args: *const stg_update_args, out: *mut stg_update_result) -> Answer {
    guard(|| unsafe {
        let update = read(args, STG_UPDATE_ARGS_MIN_SIZE, "update_args")?;
        if !out.is_null() {
            check_out(out, STG_UPDATE_RESULT_MIN_SIZE, "update_result")?;
        }
        owner(this, "optimizer_step", STG_STATE_FIT, call, |instance, strategy, _| {
            let made = strategy.update(instance, &update)?;
            if !out.is_null() {
                write(out, made);
            }
            Ok(())
        })
    })
}

unsafe extern "C" fn train_batch(
    this: Raw,
    call: *const stg_call,
    args: *const stg_step_args,
    out: *mut stg_step_result,
    updated: *mut stg_update_result,
) -> Answer {
    guard(|| unsafe {
        let (args, batch, step) = take_step(args, out, STG_STAGE_FIT)?;
        if !updated.is_null() {
            check_out(updated, STG_UPDATE_RESULT_MIN_SIZE, "update_result")?;
        }
        let is_last = args.flags & u64::from(STG_BATCH_LAST_MICRO_BATCH) != 0;
        if !is_last && !args.update.is_null() {
            return invalid("step_args.update is set, but STG_BATCH_LAST_MICRO_BATCH is not");
        }
        let update = if is_last { Some(read(args.update, STG_UPDATE_ARGS_MIN_SIZE, "step_args.update")?) } else { None };
        owner(this, "train_batch", STG_STATE_FIT, call, |instance, strategy, call| {
            let run = || -> Result<(Tree, stg_update_result)> {
                if let Some(update) = &update {
                    strategy.check_update(update)?;
                }
                let outputs = strategy.step(instance, call, &step, batch)?;
                strategy.backward(instance, call)?;
                let result = match &update {
                    Some(update) => strategy.update(instance, update)?,
                    None => no_update(strategy.total_weight()),
                };
                Ok((outputs, result))
            };
            let (outputs, result) = match run() {
                Ok(made) => made,
                Err(error) => {
                    strategy.clear(instance);
                    return Err(error);
                }
            };
            give(out, outputs, strategy);
            if !updated.is_null() {
                write(updated, result);
            }
            Ok(())
        })
    })
}

unsafe extern "C" fn zero_grad(this: Raw, call: *const stg_call) -> Answer {
    guard(|| unsafe {
        owner(this, "zero_grad", STG_STATE_FIT, call, |instance, strategy, _| {
            strategy.clear(instance);
            Ok(())
        })
    })
}

unsafe extern "C" fn parameters_changed(this: Raw, call: *const stg_call) -> Answer {
    guard(|| unsafe {
        owner(this, "parameters_changed", MODEL, call, |instance, strategy, _| {
            strategy.clear(instance);
            strategy.model()?.replica.parameters_changed()
        })
    })
}

// ---- state

unsafe extern "C" fn export_state(this: Raw, call: *const stg_call, flags: u64, out: *mut stg_tree) -> Answer {
    guard(|| unsafe {
        if flags & !u64::from(STG_EXPORT_COPY) != 0 || out.is_null() {
            return unimplemented(format!("export_state with the flags {flags} and the output {out:?}; known is 1, and an output"));
        }
        owner(this, "export_state", MODEL, call, |instance, strategy, _| {
            let is_fit = instance.state.load(Ordering::Acquire) == STG_STATE_FIT;
            let num_updates = instance.num_updates.load(Ordering::Acquire) as i64;
            let is_copy = flags != 0 || strategy.is_caller_thread_only; // a view would keep the model, for whichever thread drops it
            *out = state::export(strategy.model()?, num_updates, is_copy, is_fit).into_raw();
            Ok(())
        })
    })
}

unsafe extern "C" fn import_state(this: Raw, call: *const stg_call, state: *mut stg_tree, flags: u64, report: *mut stg_tree) -> Answer {
    guard(|| unsafe {
        let state = Tree::take(state, "state")?;
        if flags & !u64::from(STG_IMPORT_STRICT) != 0 {
            return unimplemented(format!("flags {flags}: only 1 is known here"));
        }
        owner(this, "import_state", MODEL, call, |instance, strategy, _| {
            let is_fit = instance.state.load(Ordering::Acquire) == STG_STATE_FIT;
            let (updates, made) = state::import(strategy.model()?, &state, flags != 0, is_fit)?;
            strategy.clear(instance);
            if let Some(updates) = updates {
                instance.num_updates.store(updates, Ordering::Release);
            }
            if !report.is_null() {
                ptr::write(report, made.into_raw());
            }
            Ok(())
        })
    })
}

// ---- what this strategy doesn't have

macro_rules! absent {
    ($($name:ident in $states:expr, $tree:expr, ($($argument:ident: $type:ty),*);)*) => { $(
        #[allow(unused_variables)]
        unsafe extern "C" fn $name(this: Raw, $($argument: $type),*) -> Answer {
            guard(|| unsafe {
                let moved = $tree; // consumed all the same
                owner(this, stringify!($name), $states, ptr::null(), |_, _, _| {
                    unimplemented(concat!("this strategy has no ", stringify!($name)))
                })
            })
        }
    )* };
}

absent! {
    reduce in LIVE, Tree::take(object, "object")?, (call: *const stg_call, object: *mut stg_tree, op: u32, out: *mut stg_tree);
    announce_batch in MODEL, take_announced(args), (call: *const stg_call, args: *const stg_transfer_args, stage: u32, ticket: *mut u64);
    gradients in STG_STATE_FIT, (), (call: *const stg_call, out: *mut stg_tree);
    reduce_gradients in STG_STATE_MODELLESS, release_sets(args), (call: *const stg_call, args: *const stg_reduce_gradients_args);
    load in MODEL, (), (call: *const stg_call, args: *const stg_checkpoint_args, host_json: *mut stg_tree, report: *mut stg_tree);
}

unsafe fn take_announced(args: *const stg_transfer_args) -> Option<Tree> {
    unsafe { read(args, STG_TRANSFER_ARGS_MIN_SIZE, "transfer_args").and_then(|args| Tree::take(args.batch, "batch")).ok() }
}

unsafe fn release_sets(args: *const stg_reduce_gradients_args) {
    unsafe {
        let Ok(args) = read(args, STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE, "reduce_gradients_args") else { return };
        for &set in slice(args.sets, args.num_sets) {
            if let Some(release) = set.as_ref().and_then(|set| set.release) {
                release(set);
            }
        }
    }
}
