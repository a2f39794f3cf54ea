// SPDX-License-Identifier: Apache-2.0
//! What is wrong ends in an error that says so: never in a crash, and never in a panic.
mod common;
use common::*;
use std::error::Error as _;
use std::time::{Duration, Instant};
use stratagem::*;

fn set_up(fault: Fault, devices: u32) -> Strategy<'static> {
    let mut strategy = strategy("data_parallel", &sgd().devices(devices)).unwrap();
    strategy.setup(&ModelHandle::new(Linear(fault)), None, Stage::Fit).unwrap();
    strategy
}

fn train(strategy: &mut Strategy, batch: impl Batch) -> Result<(Tree, Updated)> {
    strategy.train_batch(batch, Position::default(), Some(Update::new(0.1)))
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "\"{part}\" is not in: {text}");
    }
}

#[test]
fn a_panic_in_a_model_is_an_error_with_its_text_and_the_instance_goes_on() {
    for (fault, parts) in [
        (Fault::PanicInStep, ["the model's step panicked", "a step of 5 rows"]),
        (Fault::PanicInBackward, ["the model's backward panicked", "backward is broken"]),
    ] {
        let mut strategy = set_up(fault, 2);
        let error = train(&mut strategy, batch(10)).unwrap_err();
        assert_eq!(error.code(), Code::Internal);
        contains(&error.chain(), &parts);
        assert!(error.replica().is_some() && error.device().is_some(), "{error:?}");
        assert_eq!(strategy.status().unwrap().state, State::Fit);
        strategy.barrier("after").unwrap();
    }
    let mut strategy = strategy("data_parallel", &sgd().devices(2)).unwrap();
    let error = strategy.setup(&ModelHandle::new(Linear(Fault::PanicInReplicate)), None, Stage::Fit).unwrap_err();
    contains(&error.chain(), &["the model's replicate panicked", "no replica today"]);
    strategy.setup(&ModelHandle::new(Linear(Fault::None)), None, Stage::Fit).unwrap();
}

#[test]
fn a_panic_in_the_drop_of_a_replica_goes_no_further() {
    let mut strategy = set_up(Fault::PanicInDrop, 2);
    train(&mut strategy, batch(4)).unwrap();
    strategy.teardown().unwrap();
    assert_eq!(strategy.status().unwrap().state, State::Created);
}

#[test]
fn an_error_that_a_model_returns_comes_back_as_the_same_object() {
    let mut strategy = set_up(Fault::ErrorInStep, 2);
    let error = train(&mut strategy, batch(10)).unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    contains(&error.chain(), &["no data", "disk 7 is gone"]);
    let mut last: &dyn std::error::Error = &error;
    while let Some(next) = last.source() {
        last = next;
    }
    assert_eq!(last.downcast_ref::<DiskGone>(), Some(&DiskGone(7)));
    assert!(error.source().is_some());
}

#[test]
fn a_gradient_of_the_wrong_type_is_refused_by_name() {
    let error = train(&mut set_up(Fault::WrongGradient, 2), batch(10)).unwrap_err();
    contains(&error.chain(), &["weight", "float32", "float64"]);
}

#[test]
fn a_batch_of_the_wrong_type_is_an_error_of_the_model_that_names_it() {
    let mut strategy = set_up(Fault::None, 2);
    let wrong = Value::dict([
        ("x", Value::from(Tensor::from_vec(vec![0i64; 12], &[4, 3]).unwrap())),
        ("y", Value::from(Tensor::from_vec(vec![0f64; 4], &[4]).unwrap())),
    ]);
    let error = train(&mut strategy, Tree::from(wrong)).unwrap_err();
    contains(&error.chain(), &["the tensor is int64 (2, 3), not float64"]);
}

#[test]
fn shapes_that_disagree_are_an_error_with_both_key_paths() {
    let wrong = Value::dict([
        ("x", Value::from(Tensor::from_vec(vec![0f64; 12], &[4, 3]).unwrap())),
        ("y", Value::from(Tensor::from_vec(vec![0f64; 5], &[5]).unwrap())),
    ]);
    let error = train(&mut set_up(Fault::None, 2), Tree::from(wrong)).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    contains(&error.chain(), &["x", "y", "4", "5"]);
}

#[test]
fn a_tensor_reads_as_what_it_is_only() {
    let mut tensor = Tensor::from_vec(vec![1f32, 2.0], &[2]).unwrap();
    assert_eq!(tensor.as_slice::<f64>().unwrap_err().message(), "the tensor is float32 (2), not float64");
    assert_eq!(tensor.as_mut_slice::<i32>().unwrap_err().message(), "the tensor is float32 (2), not int32");
    assert_eq!(tensor.item().unwrap_err().message(), "the tensor (2) has 2 elements, not one");
    assert_eq!(Tensor::from_vec(vec![1u8; 5], &[2, 3]).unwrap_err().message(), "5 elements don't make a tensor of (2, 3)");
    assert!(Tensor::from_vec(vec![1u8], &[usize::MAX, 2]).is_err(), "an overflow is no number of elements");
    assert_eq!(unsafe { Tensor::from_dlpack(std::ptr::null_mut()) }.unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn a_config_that_is_garbage_is_refused_with_its_place() {
    let refused = |config: &StrategyConfig| strategy("data_parallel", config).err().unwrap();
    contains(refused(&StrategyConfig::new().set("devises", 2)).message(), &["devises", "devices"]);
    contains(refused(&StrategyConfig::new().precision("33-true")).message(), &["33-true"]);
    contains(refused(&StrategyConfig::new().set("devices", -1)).message(), &["devices"]);
    let factory = plugin("data_parallel").strategy("data_parallel").unwrap();
    for config in [serde_json::json!([1]), serde_json::json!("text"), serde_json::json!(null)] {
        assert_eq!(Strategy::create(factory, &config).err().unwrap().code(), Code::InvalidArgument, "{config}");
    }
    let unwritable = std::collections::HashMap::from([((1, 2), 3)]); // no JSON has such keys
    assert_eq!(Strategy::create(factory, &unwritable).err().unwrap().code(), Code::InvalidArgument);
}

#[test]
fn a_file_that_is_no_plugin_is_refused_before_any_of_it_runs() {
    let folder = std::env::temp_dir().join(format!("stratagem-rust-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("text.so");
    std::fs::write(&file, "no ELF").unwrap();
    let error = Plugin::load(&file).err().unwrap();
    contains(&error.chain(), &["text.so", "is no Stratagem plugin"]);
    std::fs::copy(plugin_file("data_parallel"), &file).unwrap();
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 3]).unwrap();
    contains(&Plugin::load(&file).err().unwrap().chain(), &["text.so", "cut off"]);
    std::fs::remove_dir_all(&folder).unwrap();

    let libm = ["/lib/x86_64-linux-gnu/libm.so.6", "/usr/lib64/libm.so.6"].into_iter().find(|path| std::path::Path::new(path).exists());
    let error = Plugin::load(libm.expect("a library that is no plugin")).err().unwrap();
    contains(&error.chain(), &["libm", "no note of the owner \"Stratagem\""]);
    let error = Plugin::load("/nowhere/x.so").err().unwrap();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.source().unwrap().is::<std::io::Error>());
    contains(&plugin("data_parallel").strategy("dataparallel").err().unwrap().chain(), &["dataparallel", "it offers data_parallel"]);
}

fn plugin_file(name: &str) -> std::path::PathBuf {
    build_folder().join(format!("lib/stratagem/{name}.so"))
}

#[test]
fn a_call_in_the_wrong_state_says_which_would_be_right() {
    let mut strategy = strategy("single_device", &sgd()).unwrap();
    let error = train(&mut strategy, batch(4)).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    contains(error.message(), &["setup"]);
    strategy.setup_modelless().unwrap();
    assert_eq!(strategy.backward(true).unwrap_err().code(), Code::FailedPrecondition);
    assert!(strategy.evaluation_step(Stage::Fit, batch(4), Position::default()).is_err());
}

#[test]
fn a_deadline_and_a_cancel_flag_end_a_call() {
    use std::sync::{Arc, atomic::AtomicU32};
    let mut strategy = set_up(Fault::None, 2);
    strategy.set_cancel(Some(Arc::new(AtomicU32::new(1))));
    let error = train(&mut strategy, batch(10)).unwrap_err();
    assert_eq!(error.code(), Code::Cancelled);
    strategy.set_cancel(None);
    train(&mut strategy, batch(10)).unwrap();
    strategy.set_timeout(Some(Duration::from_secs(100)));
    let begin = Instant::now();
    train(&mut strategy, batch(10)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(100));
}

#[test]
fn abort_from_another_thread_ends_a_call_and_does_nothing_later() {
    let mut strategy = set_up(Fault::None, 2);
    let abort = strategy.abort_handle();
    std::thread::spawn({
        let abort = abort.clone();
        move || abort.abort()
    })
    .join()
    .unwrap();
    assert_eq!(strategy.status().unwrap().state, State::Draining);
    assert!(train(&mut strategy, batch(10)).is_err());
    drop(strategy);
    abort.abort();
}

#[test]
fn what_is_shared_between_threads_is_what_the_tags_allow() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<Strategy<'_>>();
    sync::<Strategy<'_>>();
    send::<Abort>();
    send::<Session>();
    sync::<Session>();
    send::<Control>();
    send::<Tree>();
    send::<Tensor>();
    send::<ModelHandle>();
    send::<Error>();
    sync::<Error>();
}
