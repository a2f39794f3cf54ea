// SPDX-License-Identifier: Apache-2.0
//! Value trees: checked when they come in, copied where they are borrowed and kept, made for states.
use crate::abi::*;
use crate::error::*;
use crate::tensor::{self, Tensor};

/// # Safety
/// `count` elements, valid for 'a; null is none.
pub unsafe fn slice<'a, T>(data: *const T, count: u64) -> &'a [T] {
    if data.is_null() || count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, count as usize) } }
}

/// # Safety
/// As `slice`.
pub unsafe fn bytes<'a>(data: *const u8, count: u64) -> &'a [u8] {
    unsafe { slice(data, count) }
}

/// # Safety
/// A string valid for 'a.
pub unsafe fn key<'a>(text: stg_string) -> &'a [u8] {
    unsafe { bytes(text.data.cast(), text.size_bytes) }
}

pub fn items(value: &stg_value) -> &[stg_value] {
    if matches!(value.type_, STG_LIST | STG_TUPLE) { unsafe { slice(value.as_.items, value.count.into()) } } else { &[] }
}

pub fn entries(value: &stg_value) -> &[stg_entry] {
    if value.type_ == STG_DICT { unsafe { slice(value.as_.entries, value.count.into()) } } else { &[] }
}

pub fn find<'a>(dict: &'a stg_value, name: &str) -> Option<&'a stg_value> {
    entries(dict).iter().find(|entry| unsafe { key(entry.key) } == name.as_bytes()).map(|entry| &entry.value)
}

/// A tree that is ours, or (`release` null) one that is borrowed for the call.
pub struct Tree(pub stg_tree);

impl Drop for Tree {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            unsafe { release(&mut self.0) };
        }
    }
}

impl Tree {
    /// An argument: consumed, if it was moved, whatever comes next. Checked.
    ///
    /// # Safety
    /// Null or a tree.
    pub unsafe fn take(from: *mut stg_tree, name: &str) -> Result<Tree> {
        let Some(from) = (unsafe { from.as_mut() }) else { return invalid(format!("{name} is null")) };
        let tree = Tree(*from);
        if from.release.is_some() {
            *from = unsafe { std::mem::zeroed() };
        }
        let mut num_nodes = 0;
        check_value(&tree.0.root, name, 1, &mut num_nodes)?;
        Ok(tree)
    }

    /// To keep, or to give out: a copy, if it is borrowed.
    pub fn owned(self) -> Tree {
        if self.0.release.is_some() { self } else { Builder::tree(|builder| builder.copy(&self.0.root)) }
    }

    pub fn root(&self) -> &stg_value {
        &self.0.root
    }

    pub fn into_raw(self) -> stg_tree {
        std::mem::ManuallyDrop::new(self).0
    }
}

fn check_value(value: &stg_value, path: &str, depth: u32, num_nodes: &mut u32) -> Result<()> {
    *num_nodes += 1;
    if depth > STG_MAX_TREE_DEPTH || *num_nodes > STG_MAX_TREE_NODES {
        return invalid(format!("{path}: a tree has at most {STG_MAX_TREE_DEPTH} levels and {STG_MAX_TREE_NODES} nodes"));
    }
    let is_counted = matches!(value.type_, STG_STRING | STG_BYTES | STG_LIST | STG_TUPLE | STG_DICT);
    if value.type_ > STG_OPAQUE {
        return invalid(format!("{path} has the unknown type {}", value.type_));
    }
    if is_counted && value.count > 0 && unsafe { value.as_.items }.is_null() {
        return invalid(format!("{path} has a count but a null pointer"));
    }
    if value.type_ == STG_BOOL && !matches!(unsafe { value.as_.i64_ }, 0 | 1) {
        return invalid(format!("{path} is a bool that is not 0 or 1"));
    }
    if value.type_ == STG_TENSOR {
        if let Some(fault) = tensor::fault(unsafe { value.as_.tensor }) {
            return invalid(format!("{path} is {fault}"));
        }
    }
    if value.type_ == STG_OPAQUE {
        let whole = unsafe { value.as_.opaque.as_ref() }
            .is_some_and(|opaque| opaque.struct_size >= STG_OPAQUE_MIN_SIZE.into() && opaque.retain.is_some() && opaque.release.is_some());
        if !whole {
            return invalid(format!("{path} is an opaque value without retain and release"));
        }
    }
    for (index, item) in items(value).iter().enumerate() {
        check_value(item, &format!("{path}[{index}]"), depth + 1, num_nodes)?;
    }
    let mut seen = std::collections::HashSet::new();
    for entry in entries(value) {
        if entry.key.data.is_null() && entry.key.size_bytes > 0 {
            return invalid(format!("{path} has a key without text"));
        }
        let name = unsafe { key(entry.key) };
        let path = format!("{path}.{}", String::from_utf8_lossy(name));
        if !seen.insert(name) {
            return invalid(format!("{path} is there twice"));
        }
        check_value(&entry.value, &path, depth + 1, num_nodes)?;
    }
    Ok(())
}

/// How many rows a batch has: all tensors with a first dimension must agree. None without any.
pub fn batch_rows(value: &stg_value, path: &str, first: &mut Option<(String, i64)>) -> Result<()> {
    if value.type_ == STG_TENSOR {
        if let Some(&rows) = tensor::shape(unsafe { &(*value.as_.tensor).view }).first() {
            match first {
                None => *first = Some((path.to_owned(), rows)),
                Some((other, wanted)) if *wanted != rows => {
                    return invalid(format!("{path} has {rows} rows, {other} has {wanted}; all tensors of a batch must agree"));
                }
                _ => {}
            }
        }
    }
    for (index, item) in items(value).iter().enumerate() {
        batch_rows(item, &format!("{path}[{index}]"), first)?;
    }
    for entry in entries(value) {
        batch_rows(&entry.value, &format!("{path}.{}", String::from_utf8_lossy(unsafe { key(entry.key) })), first)?;
    }
    Ok(())
}

// ---- making

/// The memory of a tree made here.
#[derive(Default)]
pub struct Builder {
    items: Vec<Box<[stg_value]>>,
    entries: Vec<Box<[stg_entry]>>,
    texts: Vec<Box<[u8]>>,
}

type As = stg_value__bindgen_ty_1;

unsafe extern "C" fn release(tree: *mut stg_tree) {
    let taken = unsafe { std::mem::replace(&mut *tree, std::mem::zeroed()) };
    release_leaves(&taken.root);
    drop(unsafe { Box::from_raw(taken.owner.cast::<Builder>()) });
}

fn release_leaves(value: &stg_value) {
    unsafe {
        if value.type_ == STG_TENSOR {
            drop(Tensor::take(value.as_.tensor));
        }
        if value.type_ == STG_OPAQUE {
            if let Some(release) = (*value.as_.opaque).release {
                release(value.as_.opaque);
            }
        }
    }
    items(value).iter().for_each(release_leaves);
    entries(value).iter().for_each(|entry| release_leaves(&entry.value));
}

impl Builder {
    pub fn tree(build: impl FnOnce(&mut Builder) -> stg_value) -> Tree {
        let mut builder = Box::<Builder>::default();
        let root = build(&mut builder);
        Tree(stg_tree { root, release: Some(release), owner: Box::into_raw(builder).cast() })
    }

    fn keep(&mut self, bytes: &[u8]) -> *const u8 {
        self.texts.push(bytes.into());
        self.texts[self.texts.len() - 1].as_ptr()
    }

    pub fn int(value: i64) -> stg_value {
        stg_value { type_: STG_INT64, count: 0, as_: As { i64_: value } }
    }

    pub fn text(&mut self, text: &str) -> stg_value {
        stg_value { type_: STG_STRING, count: text.len() as u32, as_: As { utf8: self.keep(text.as_bytes()).cast() } }
    }

    pub fn none() -> stg_value {
        stg_value { type_: STG_NONE, count: 0, as_: As { i64_: 0 } }
    }

    pub fn tensor(tensor: Tensor) -> stg_value {
        stg_value { type_: STG_TENSOR, count: 0, as_: As { tensor: tensor.into_raw() } }
    }

    pub fn list(&mut self, type_: u32, values: Vec<stg_value>) -> stg_value {
        let mut made = values.into_boxed_slice();
        let value = stg_value { type_, count: made.len() as u32, as_: As { items: made.as_mut_ptr() } };
        self.items.push(made);
        value
    }

    pub fn dict<'a>(&mut self, values: impl IntoIterator<Item = (&'a [u8], stg_value)>) -> stg_value {
        let entry = |(key, value): (&[u8], stg_value)| stg_entry {
            key: stg_string { data: self.keep(key).cast(), size_bytes: key.len() as u64 },
            value,
        };
        let mut made: Box<[stg_entry]> = values.into_iter().map(entry).collect();
        let value = stg_value { type_: STG_DICT, count: made.len() as u32, as_: As { entries: made.as_mut_ptr() } };
        self.entries.push(made);
        value
    }

    /// Everything is the copy's own, but for opaque objects, which are never copied.
    pub fn copy(&mut self, from: &stg_value) -> stg_value {
        unsafe {
            match from.type_ {
                STG_TENSOR => Builder::tensor(tensor::copy(&(*from.as_.tensor).view)),
                STG_STRING | STG_BYTES => {
                    let data = self.keep(bytes(from.as_.bytes, from.count.into()));
                    stg_value { type_: from.type_, count: from.count, as_: As { bytes: data } }
                }
                STG_LIST | STG_TUPLE => {
                    let values = items(from).iter().map(|item| self.copy(item)).collect();
                    self.list(from.type_, values)
                }
                STG_DICT => {
                    let values: Vec<_> = entries(from).iter().map(|entry| (key(entry.key), self.copy(&entry.value))).collect();
                    self.dict(values)
                }
                STG_OPAQUE => {
                    if let Some(retain) = (*from.as_.opaque).retain {
                        retain(from.as_.opaque);
                    }
                    *from
                }
                _ => *from,
            }
        }
    }
}
