// SPDX-License-Identifier: Apache-2.0
//! Fashion-MNIST as Debian's package dataset-fashion-mnist has it: IDX files, gzipped.
use crate::Result;
use candle_core::{Device, Tensor};
use std::io::Read;
use std::path::{Path, PathBuf};
use stratagem::Value;

pub const IMAGE_SIZE: usize = 28 * 28;

pub struct Images {
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

/// Some rows, for candle.
pub struct Batch {
    pub pixels: Tensor, // uint8 (rows, 784)
    pub labels: Tensor, // uint32 (rows)
}

fn read_idx(file: &Path, header_bytes: usize) -> Result<Vec<u8>> {
    let opened = std::fs::File::open(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(opened).read_to_end(&mut bytes)?;
    if bytes.len() < header_bytes {
        return Err(format!("{} ends in its header", file.display()).into());
    }
    Ok(bytes.split_off(header_bytes))
}

impl Images {
    pub fn read(name: &str, num_images: usize) -> Result<Images> {
        let folder = std::env::var_os("FASHION_MNIST").map_or_else(|| PathBuf::from("/usr/share/datasets/fashion-mnist"), PathBuf::from);
        let mut pixels = read_idx(&folder.join(format!("{name}-images-idx3-ubyte.gz")), 16)?;
        let mut labels = read_idx(&folder.join(format!("{name}-labels-idx1-ubyte.gz")), 8)?;
        let num_images = num_images.min(labels.len()).min(pixels.len() / IMAGE_SIZE);
        pixels.truncate(num_images * IMAGE_SIZE);
        labels.truncate(num_images);
        Ok(Images { pixels, labels })
    }

    pub fn batches(&self, size: usize) -> impl Iterator<Item = Batch> {
        self.pixels.chunks(size * IMAGE_SIZE).zip(self.labels.chunks(size)).map(|(pixels, labels)| Batch::new(pixels, labels))
    }
}

impl Batch {
    fn new(pixels: &[u8], labels: &[u8]) -> Batch {
        let shape = (labels.len(), IMAGE_SIZE);
        let labels: Vec<u32> = labels.iter().map(|&label| label.into()).collect();
        Batch {
            pixels: Tensor::from_slice(pixels, shape, &Device::Cpu).expect("as many pixels as the shape says"),
            labels: Tensor::new(labels, &Device::Cpu).expect("a vector is a tensor"),
        }
    }

    pub fn num_rows(&self) -> usize {
        self.labels.elem_count()
    }

    /// In nearly equal parts.
    pub fn split(&self, num_shares: usize) -> Result<Vec<Batch>> {
        let rows = self.num_rows();
        let share = |index: usize| -> Result<Batch> {
            let (begin, end) = (index * rows / num_shares, (index + 1) * rows / num_shares);
            Ok(Batch { pixels: self.pixels.narrow(0, begin, end - begin)?, labels: self.labels.narrow(0, begin, end - begin)? })
        };
        (0..num_shares).map(share).collect()
    }

    /// As a strategy takes it.
    pub fn to_tree(&self) -> Result<stratagem::Tree> {
        let rows = self.num_rows();
        let pixels = self.pixels.flatten_all()?.to_vec1::<u8>()?;
        let labels = self.labels.to_vec1::<u32>()?;
        Ok(Value::dict([
            ("inputs", Value::from(stratagem::Tensor::from_vec(pixels, &[rows, IMAGE_SIZE])?)),
            ("targets", Value::from(stratagem::Tensor::from_vec(labels, &[rows])?)),
        ])
        .into())
    }
}
