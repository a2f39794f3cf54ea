// SPDX-License-Identifier: Apache-2.0
//! The model and its one replica, called through their table. Dropping it gives back what is held, in the right order.
use crate::abi::*;
use crate::error::*;
use crate::strategy::CPU;
use crate::tensor::{self, Tensor};
use crate::tree::{Tree, key, slice};
use std::ptr;

/// Shared with the tensors that were lent out: they keep the model alive.
pub struct Replica {
    table: stg_model, // a copy, of which functions past its size are null
    raw: *mut stg_replica,
}

// Tensors that were lent out may be released on any thread, one at a time with everything else that is done to it.
unsafe impl Send for Replica {}
unsafe impl Sync for Replica {}

pub struct Parameter {
    pub names: Vec<Vec<u8>>,
    pub view: stg_tensor_view, // the model's memory
    pub flags: u64,
}

impl Parameter {
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.names[0]).into_owned()
    }

    pub fn is_trained(&self) -> bool {
        self.flags & u64::from(STG_PARAMETER_REQUIRES_GRAD) != 0
    }
}

/// A graph that backward has not consumed yet; dropped before its replica.
pub struct Graph(*mut stg_graph);

pub struct Step {
    pub outputs: Tree,
    pub denominator: Option<f64>,
    pub graph: Option<Graph>,
}

impl Replica {
    /// # Safety
    /// A model as setup was given it.
    pub unsafe fn new(model: *const stg_model, seed: u64) -> Result<Replica> {
        let size = unsafe { *model.cast::<u64>() };
        if size < STG_MODEL_MIN_SIZE.into() || size > STG_MAX_STRUCT_SIZE_BYTES.into() {
            return invalid(format!("the model's struct_size is {size}; at least {STG_MODEL_MIN_SIZE} is needed"));
        }
        let mut table: stg_model = unsafe { std::mem::zeroed() };
        let known = (size as usize).min(size_of::<stg_model>()) / 8 * 8; // half a slot is none
        unsafe { ptr::copy_nonoverlapping(model.cast::<u8>(), (&raw mut table).cast(), known) };
        let needed = table.replicate.is_some() && table.destroy_replica.is_some() && table.describe.is_some();
        if !needed || table.set_mode.is_none() || table.step.is_none() || table.backward.is_none() || table.release_graph.is_none() {
            return invalid("the model lacks one of the functions up to release_graph");
        }
        if let Some(retain) = table.retain {
            unsafe { retain(table.self_) };
        }
        let mut replica = Replica { table, raw: ptr::null_mut() };
        let mut args: stg_replicate_args = unsafe { std::mem::zeroed() };
        args.struct_size = size_of::<stg_replicate_args>() as u64;
        (args.device, args.num_replicas, args.seed) = (CPU, 1, seed);
        unsafe { check(table.replicate.unwrap()(table.self_, &args, &mut replica.raw), "the model's replicate")? };
        Ok(replica)
    }

    /// Parameters, then buffers; and what the model said, which is its own until it is asked again: so it is asked once.
    pub fn describe(&self) -> Result<(Vec<Parameter>, Vec<Parameter>, stg_model_description)> {
        let mut out: stg_model_description = unsafe { std::mem::zeroed() };
        out.struct_size = size_of::<stg_model_description>() as u64;
        unsafe {
            check(self.table.describe.unwrap()(self.table.self_, self.raw, &mut out), "the model's describe")?;
            if out.loss_kind > STG_LOSS_SUM.into() {
                return invalid(format!("the model's loss_kind is {}; known are 0 (mean) and 1 (sum)", out.loss_kind));
            }
            let parameters = read_all(out.parameters, out.num_parameters, "parameter")?;
            Ok((parameters, read_all(out.buffers, out.num_buffers, "buffer")?, out))
        }
    }

    pub fn set_mode(&self, train: bool) -> Result<()> {
        unsafe { check(self.table.set_mode.unwrap()(self.table.self_, self.raw, train.into()), "the model's set_mode") }
    }

    pub fn step(&self, context: &stg_step_context, batch: Tree) -> Result<Step> {
        let mut batch = self.transfer(batch, context.dataloader_index)?.into_raw();
        let mut result: stg_model_step_result = unsafe { std::mem::zeroed() };
        result.struct_size = size_of::<stg_model_step_result>() as u64;
        unsafe { check(self.table.step.unwrap()(self.table.self_, self.raw, context, &mut batch, &mut result), "the model's step")? };
        let outputs = Tree(result.outputs);
        let graph = (!result.graph.is_null()).then_some(Graph(result.graph));
        match read_denominator(&result.denominator) {
            Ok(denominator) => Ok(Step { outputs, denominator, graph }),
            Err(error) => {
                self.drop_graph(graph);
                Err(error)
            }
        }
    }

    /// The model's own way to its device, if it has one.
    fn transfer(&self, batch: Tree, dataloader_index: i64) -> Result<Tree> {
        let Some(transfer) = self.table.transfer else { return Ok(batch) };
        let (mut batch, mut out) = (batch.into_raw(), Tree(unsafe { std::mem::zeroed() }));
        unsafe { check(transfer(self.table.self_, self.raw, &mut batch, dataloader_index, &mut out.0), "the model's transfer")? };
        Ok(out)
    }

    pub fn drop_graph(&self, graph: Option<Graph>) {
        if let Some(Graph(graph)) = graph {
            unsafe { self.table.release_graph.unwrap()(self.table.self_, self.raw, graph) };
        }
    }

    /// The gradients by parameter.
    pub fn backward(&self, graph: Graph, scale: f64, parameters: &[Parameter]) -> Result<Vec<Option<Vec<f64>>>> {
        let mut collected = Collected { parameters, gradients: vec![None; parameters.len()], seen: vec![false; parameters.len()] };
        let sink = stg_gradient_sink {
            struct_size: size_of::<stg_gradient_sink>() as u64,
            self_: (&raw mut collected).cast(),
            ready: Some(ready),
            ready_sparse: None, // the model makes them dense
        };
        let error = unsafe { self.table.backward.unwrap()(self.table.self_, self.raw, graph.0, scale, 0, &sink) };
        unsafe { check(error, "the model's backward")? };
        if !parameters.is_empty() && !collected.seen.contains(&true) {
            return invalid("the model reported neither a gradient nor null for any parameter");
        }
        Ok(collected.gradients)
    }

    pub fn parameters_changed(&self) -> Result<()> {
        match self.table.parameters_changed {
            Some(function) => unsafe { check(function(self.table.self_, self.raw), "the model's parameters_changed") },
            None => Ok(()),
        }
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        unsafe {
            if !self.raw.is_null() {
                self.table.destroy_replica.unwrap()(self.table.self_, self.raw);
            }
            if let Some(release) = self.table.release {
                release(self.table.self_);
            }
        }
    }
}

unsafe fn read_all(list: *const *const stg_parameter, count: u64, kind: &str) -> Result<Vec<Parameter>> {
    let mut all = Vec::new();
    for (index, &entry) in unsafe { slice(list, count) }.iter().enumerate() {
        let entry = unsafe { crate::entry::read_table(entry, STG_PARAMETER_MIN_SIZE, kind)? };
        let names: Vec<Vec<u8>> = unsafe { slice(entry.names, entry.num_names).iter().map(|&name| key(name).to_vec()).collect() };
        if names.is_empty() {
            return invalid(format!("the model's {kind} {index} has no name"));
        }
        let name = String::from_utf8_lossy(&names[0]).into_owned();
        if let Some(fault) = tensor::fault(entry.tensor) {
            return invalid(format!("the model's {kind} {name} is {fault}"));
        }
        let tensor = unsafe { &*entry.tensor };
        let mut flags = entry.flags;
        if tensor.flags & u64::from(STG_TENSOR_READ_ONLY) != 0 {
            flags &= !u64::from(STG_PARAMETER_PINNED);
        }
        all.push(Parameter { names, view: tensor.view, flags });
    }
    Ok(all)
}

/// None where the step reports none. A tensor is ours, and read once.
fn read_denominator(value: &stg_value) -> Result<Option<f64>> {
    let number = match value.type_ {
        STG_NONE => return Ok(None),
        STG_INT64 => unsafe { value.as_.i64_ as f64 },
        STG_DOUBLE => unsafe { value.as_.f64_ },
        STG_TENSOR => {
            let tensor = unsafe { Tensor::take(value.as_.tensor) };
            if let Some(fault) = tensor::fault(unsafe { value.as_.tensor }) {
                return invalid(format!("the step's denominator is {fault}"));
            }
            if tensor::numel(tensor.view()) != 1 || !tensor::is_real(tensor.view()) {
                return invalid(format!("the step's denominator is {}; it must be one float", tensor::text(tensor.view())));
            }
            tensor::read(tensor.view())[0]
        }
        other => return invalid(format!("the step's denominator has the type {other}; it must be a number")),
    };
    if number.is_finite() && number >= 0.0 {
        return Ok(Some(number));
    }
    invalid(format!("the step's denominator is {number}; it must be finite and at least 0"))
}

/// What a backward has reported.
struct Collected<'a> {
    parameters: &'a [Parameter],
    gradients: Vec<Option<Vec<f64>>>,
    seen: Vec<bool>,
}

unsafe extern "C" fn ready(
    this: *mut std::ffi::c_void,
    index: u64,
    gradient: *mut stg_tensor,
    _stream: *const stg_stream,
) -> *mut stg_error {
    crate::entry::guard(|| unsafe { (*this.cast::<Collected<'_>>()).take(index as usize, gradient) })
}

impl Collected<'_> {
    /// The tensor is consumed on every return.
    unsafe fn take(&mut self, index: usize, gradient: *mut stg_tensor) -> Result<()> {
        let fault = (!gradient.is_null()).then(|| tensor::fault(gradient)).flatten();
        let gradient = (!gradient.is_null()).then(|| unsafe { Tensor::take(gradient) });
        let Some(parameter) = self.parameters.get(index) else {
            return invalid(format!("a gradient for parameter {index}; the model has {}", self.parameters.len()));
        };
        let name = parameter.name();
        if std::mem::replace(&mut self.seen[index], true) {
            return invalid(format!("the gradient of {name} was reported twice in one backward"));
        }
        if let Some(fault) = fault {
            return invalid(format!("the gradient of {name} is {fault}"));
        }
        let Some(gradient) = gradient else { return Ok(()) };
        if !parameter.is_trained() {
            return precondition(format!("{name} has a gradient, but was frozen at setup"));
        }
        if !tensor::same_kind(gradient.view(), &parameter.view) {
            let (is, wanted) = (tensor::text(gradient.view()), tensor::text(&parameter.view));
            return invalid(format!("the gradient of {name} is {is}; its parameter is {wanted}"));
        }
        self.gradients[index] = Some(tensor::read(gradient.view()));
        Ok(())
    }
}
