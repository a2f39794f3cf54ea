// SPDX-License-Identifier: Apache-2.0
//! The network: two linear layers, in candle. Nothing here knows of strategies.
use crate::Result;
use crate::data::{IMAGE_SIZE, Images};
use candle_core::{D, DType, Device, Error, Tensor, Var};

const NUM_HIDDEN: usize = 64;
const NUM_CLASSES: usize = 10;

pub const NAMES: [&str; 4] = ["hidden.weight", "hidden.bias", "output.weight", "output.bias"];
pub const SHAPES: [&[usize]; 4] = [&[NUM_HIDDEN, IMAGE_SIZE], &[NUM_HIDDEN], &[NUM_CLASSES, NUM_HIDDEN], &[NUM_CLASSES]];

pub struct Net {
    vars: Vec<Var>,
}

/// Of the seed alone: uniform, as wide as the layer's inputs allow.
pub fn initial(index: usize, seed: u64) -> Vec<f32> {
    let bound = 1.0 / (if index < 2 { IMAGE_SIZE } else { NUM_HIDDEN } as f32).sqrt();
    let mut state = seed.wrapping_mul(4).wrapping_add(index as u64);
    let next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15); // splitmix64
        let mut bits = state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((bits ^ (bits >> 31)) >> 40) as f32 / (1u64 << 24) as f32;
        (2.0 * unit - 1.0) * bound
    };
    std::iter::repeat_with(next).take(SHAPES[index].iter().product()).collect()
}

impl Net {
    pub fn new(seed: u64) -> Result<Net> {
        let var = |index| Ok(Var::from_tensor(&Tensor::from_vec(initial(index, seed), SHAPES[index], &Device::Cpu)?)?);
        Ok(Net { vars: (0..NAMES.len()).map(var).collect::<Result<_>>()? })
    }

    /// A copy of the elements becomes the parameter.
    pub fn set(&mut self, index: usize, elements: &[f32]) -> Result<()> {
        Ok(self.vars[index].set(&Tensor::from_slice(elements, SHAPES[index], &Device::Cpu)?)?)
    }

    /// tanh, not ReLU: where that bends, rounding decides about a whole unit, and weights that were computed in another order part by 1e-4 at
    /// once, by 1e-2 within an epoch.
    pub fn logits(&self, pixels: &Tensor) -> Result<Tensor, Error> {
        let inputs = (pixels.to_dtype(DType::F32)? / 255.0)?;
        let hidden = inputs.matmul(&self.vars[0].t()?)?.broadcast_add(&self.vars[1])?.tanh()?;
        hidden.matmul(&self.vars[2].t()?)?.broadcast_add(&self.vars[3])
    }

    /// Cross entropy, the mean over the rows.
    pub fn loss(&self, logits: &Tensor, labels: &Tensor) -> Result<Tensor, Error> {
        let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?;
        let log_sums = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
        let chosen = shifted.broadcast_sub(&log_sums)?.gather(&labels.unsqueeze(1)?, 1)?;
        chosen.mean_all()?.neg()
    }

    /// By candle's autograd, in the order of the parameters.
    pub fn gradients(&self, loss: &Tensor, scale: f64) -> Result<Vec<Tensor>, Error> {
        let store = (loss * scale)?.backward()?;
        let of = |var: &Var| store.get(var).cloned().ok_or_else(|| Error::Msg("a parameter without a gradient".to_owned()));
        self.vars.iter().map(of).collect()
    }

    pub fn descend(&mut self, gradients: &[Tensor], lr: f64) -> Result<()> {
        for (var, gradient) in self.vars.iter().zip(gradients) {
            var.set(&var.as_tensor().sub(&(gradient * lr)?)?)?;
        }
        Ok(())
    }

    /// The same with gradients that a strategy reduced.
    pub fn descend_by(&mut self, gradients: &[Option<stratagem::Tensor>], lr: f64) -> Result<()> {
        for (index, gradient) in gradients.iter().enumerate() {
            let gradient = gradient.as_ref().ok_or("a parameter without a gradient")?.as_slice::<f32>()?;
            let var = &self.vars[index];
            var.set(&var.as_tensor().sub(&(Tensor::from_slice(gradient, SHAPES[index], &Device::Cpu)? * lr)?)?)?;
        }
        Ok(())
    }

    pub fn accuracy(&self, images: &Images) -> Result<f64> {
        let (mut correct, mut rows) = (0.0, 0);
        for batch in images.batches(500) {
            let chosen = self.logits(&batch.pixels)?.argmax(D::Minus1)?;
            correct += f64::from(chosen.eq(&batch.labels)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?);
            rows += batch.num_rows();
        }
        Ok(correct / rows as f64)
    }

    /// The largest difference of a weight.
    pub fn distance(&self, other: &Net) -> Result<f32> {
        let mut largest = 0f32;
        for (a, b) in self.vars.iter().zip(&other.vars) {
            largest = largest.max(a.as_tensor().sub(b)?.abs()?.max_all()?.to_scalar()?);
        }
        Ok(largest)
    }
}
