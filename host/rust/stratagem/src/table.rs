// SPDX-License-Identifier: Apache-2.0
//! The C table of a Rust model: each function turns its arguments into Rust's, and keeps errors and panics from C.
use crate::error::{Error, Result, contain, guard};
use crate::model::{LossKind, Memory, Model, Parameter, Parameters, Replica, ReplicateArgs, Sink, Stage, StepContext};
use crate::tensor::Tensor;
use crate::types::{DType, Device, sized, to_text};
use crate::value::Tree;
use std::ffi::c_void;
use std::sync::Arc;
use stratagem_sys as sys;

/// C's references are the Arc's. The table is first, so that a pointer to it is one to the whole.
#[repr(C)]
pub(crate) struct Table<M> {
    raw: sys::stg_model,
    model: M,
}

/// A replica, and what C sees of it: lists that stay until the next describe.
struct Slot<R> {
    replica: R,
    memory: Parameters,
    is_bound: bool, // since the replica was last told of changes
    parameters: Described,
    buffers: Described,
}

impl<R: Replica> Slot<R> {
    fn parts(&mut self) -> (&mut R, Memory<'_>) {
        (&mut self.replica, Memory { parameters: &self.memory.parameters, buffers: &mut self.memory.buffers })
    }

    fn parameters_changed(&mut self) -> Result<()> {
        self.is_bound = false;
        let (replica, memory) = self.parts();
        replica.parameters_changed(memory)
    }
}

#[derive(Default)]
struct Described {
    names: Vec<Box<[sys::stg_string]>>,
    entries: Vec<sys::stg_parameter>,
    pointers: Vec<*const sys::stg_parameter>,
}

// Its pointers are into the replica beside it.
unsafe impl Send for Described {}

impl Described {
    fn fill(&mut self, parameters: &[Parameter]) {
        self.names = parameters.iter().map(|parameter| parameter.names.iter().map(|name| to_text(name)).collect()).collect();
        let entry = |(parameter, names): (&Parameter, &Box<[sys::stg_string]>)| {
            sized!(stg_parameter {
                names: names.as_ptr(),
                num_names: names.len() as u64,
                tensor: parameter.tensor.as_raw(),
                flags: parameter.flags,
            })
        };
        self.entries = parameters.iter().zip(&self.names).map(entry).collect();
        self.pointers = self.entries.iter().map(std::ptr::from_ref).collect();
    }
}

impl<M: Model> Table<M> {
    pub(crate) fn new(model: M) -> Arc<Table<M>> {
        let raw = sized!(stg_model {
            retain: Some(retain::<M>),
            release: Some(release::<M>),
            replicate: Some(replicate::<M>),
            destroy_replica: Some(destroy_replica::<M>),
            describe: Some(describe::<M>),
            set_mode: Some(set_mode::<M>),
            step: Some(step::<M>),
            backward: Some(backward::<M>),
            release_graph: Some(release_graph::<M>),
            bind: Some(bind::<M>),
            parameters_changed: Some(parameters_changed::<M>),
        });
        let mut table = Arc::new(Table { raw, model });
        let pointer = Arc::as_ptr(&table).cast_mut().cast();
        Arc::get_mut(&mut table).expect("nobody else has it yet").raw.self_ = pointer;
        table
    }
}

unsafe extern "C" fn retain<M: Model>(this: *mut c_void) {
    unsafe { Arc::increment_strong_count(this.cast::<Table<M>>()) };
}

unsafe extern "C" fn release<M: Model>(this: *mut c_void) {
    contain(|| unsafe { Arc::decrement_strong_count(this.cast::<Table<M>>()) });
}

unsafe fn slot<'a, M: Model>(replica: *mut sys::stg_replica) -> &'a mut Slot<M::Replica> {
    unsafe { &mut *replica.cast() }
}

/// # Safety
/// As `graph` of `step`, and not taken before.
unsafe fn take_graph<M: Model>(graph: *mut sys::stg_graph) -> Box<<M::Replica as Replica>::Graph> {
    unsafe { Box::from_raw(graph.cast()) }
}

unsafe extern "C" fn replicate<M: Model>(
    this: *mut c_void,
    args: *const sys::stg_replicate_args,
    out: *mut *mut sys::stg_replica,
) -> *mut sys::stg_error {
    guard("the model's replicate", || unsafe {
        let args = &*args;
        let args = ReplicateArgs {
            device: Device::from_abi(args.device),
            replica: args.replica,
            num_replicas: args.num_replicas,
            floating_dtype: DType::from_abi(args.floating_dtype),
            num_threads: (args.num_threads != 0).then_some(args.num_threads),
            seed: args.seed,
        };
        let (replica, memory) = (*this.cast::<Table<M>>()).model.replicate(&args)?;
        let (parameters, buffers) = (Described::default(), Described::default());
        let slot = Slot { replica, memory, is_bound: false, parameters, buffers };
        *out = Box::into_raw(Box::new(slot)).cast();
        Ok(())
    })
}

unsafe extern "C" fn destroy_replica<M: Model>(_: *mut c_void, replica: *mut sys::stg_replica) {
    contain(|| drop(unsafe { Box::from_raw(replica.cast::<Slot<M::Replica>>()) }));
}

unsafe extern "C" fn describe<M: Model>(
    _: *mut c_void,
    replica: *mut sys::stg_replica,
    out: *mut sys::stg_model_description,
) -> *mut sys::stg_error {
    guard("the model's description", || unsafe {
        let slot = slot::<M>(replica);
        slot.parameters.fill(&slot.memory.parameters);
        slot.buffers.fill(&slot.memory.buffers);
        let out = &mut *out;
        out.struct_size = out.struct_size.min(size_of::<sys::stg_model_description>() as u64);
        (out.parameters, out.num_parameters) = (slot.parameters.pointers.as_ptr(), slot.parameters.pointers.len() as u64);
        (out.buffers, out.num_buffers) = (slot.buffers.pointers.as_ptr(), slot.buffers.pointers.len() as u64);
        out.loss_kind = match slot.replica.loss_kind() {
            LossKind::Mean => sys::STG_LOSS_MEAN.into(),
            LossKind::Sum => sys::STG_LOSS_SUM.into(),
        };
        Ok(())
    })
}

unsafe extern "C" fn set_mode<M: Model>(_: *mut c_void, replica: *mut sys::stg_replica, train: u32) -> *mut sys::stg_error {
    guard("the model's set_training", || unsafe { slot::<M>(replica).replica.set_training(train != 0) })
}

fn read_context(from: &sys::stg_step_context) -> Result<StepContext> {
    Ok(StepContext {
        device: Device::from_abi(from.device),
        replica: from.replica,
        num_replicas: from.num_replicas,
        stage: Stage::from_abi(from.stage.into())?,
        needs_graph: from.flags & sys::STG_STEP_GRADIENT != 0,
        batch_index: from.batch_index,
        dataloader_index: from.dataloader_index,
        global_step: from.global_step,
        autocast_dtype: DType::from_abi(from.autocast_dtype),
    })
}

unsafe extern "C" fn step<M: Model>(
    _: *mut c_void,
    replica: *mut sys::stg_replica,
    context: *const sys::stg_step_context,
    batch: *mut sys::stg_tree,
    result: *mut sys::stg_model_step_result,
) -> *mut sys::stg_error {
    // Moved, on every return.
    let batch = unsafe { Tree::from_raw(std::mem::replace(&mut *batch, std::mem::zeroed())) };
    guard("the model's step", || unsafe {
        let slot = slot::<M>(replica);
        if slot.is_bound {
            slot.parameters_changed()?;
        }
        let (replica, memory) = slot.parts();
        let made = replica.step(memory, &read_context(&*context)?, batch)?;
        let result = &mut *result;
        if let Some(denominator) = made.denominator {
            let as_ = sys::stg_value__bindgen_ty_1 { f64_: denominator };
            result.denominator = sys::stg_value { type_: sys::STG_DOUBLE, count: 0, as_ };
        }
        result.outputs = made.outputs.into_raw();
        result.graph = made.graph.map_or(std::ptr::null_mut(), |graph| Box::into_raw(Box::new(graph)).cast());
        Ok(())
    })
}

unsafe extern "C" fn backward<M: Model>(
    _: *mut c_void,
    replica: *mut sys::stg_replica,
    graph: *mut sys::stg_graph,
    scale: f64,
    _flags: u32,
    sink: *const sys::stg_gradient_sink,
) -> *mut sys::stg_error {
    guard("the model's backward", || unsafe {
        let graph = take_graph::<M>(graph);
        let (replica, memory) = slot::<M>(replica).parts();
        replica.backward(memory, *graph, scale, &mut Sink::new(&*sink))
    })
}

unsafe extern "C" fn release_graph<M: Model>(_: *mut c_void, _: *mut sys::stg_replica, graph: *mut sys::stg_graph) {
    contain(|| drop(unsafe { take_graph::<M>(graph) }));
}

/// The strategy's memory takes the place of the parameter's.
unsafe extern "C" fn bind<M: Model>(
    _: *mut c_void,
    replica: *mut sys::stg_replica,
    index: u64,
    storage: *const sys::stg_tensor,
    _gradient: *const sys::stg_tensor,
) -> *mut sys::stg_error {
    guard("the model's bind", || unsafe {
        let slot = slot::<M>(replica);
        let num_parameters = slot.memory.parameters.len();
        let index = index as usize;
        let parameter = match index.checked_sub(num_parameters) {
            None => slot.memory.parameters.get_mut(index),
            Some(buffer) => slot.memory.buffers.get_mut(buffer),
        };
        let parameter = parameter.ok_or_else(|| Error::invalid(format!("parameter {index} of {num_parameters} can't be bound")))?;
        let bound = Tensor::over(&*storage);
        if bound.dtype() != parameter.tensor.dtype() || bound.shape() != parameter.tensor.shape() {
            return Err(Error::invalid(format!("{} is {:?}, its storage {bound:?}", parameter.names[0], parameter.tensor)));
        }
        parameter.tensor = bound;
        slot.is_bound = true;
        Ok(())
    })
}

unsafe extern "C" fn parameters_changed<M: Model>(_: *mut c_void, replica: *mut sys::stg_replica) -> *mut sys::stg_error {
    guard("the model's parameters_changed", || unsafe { slot::<M>(replica).parameters_changed() })
}
