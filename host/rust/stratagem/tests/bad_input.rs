// SPDX-License-Identifier: Apache-2.0
//! What is wrong ends in an error that says so: never in a crash, and never in a panic.
mod common;
use common::plane::{Plane, rows};
use common::*;
use std::error::Error as _;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use stratagem::*;

fn set_up(fault: Fault, devices: u32) -> Strategy<'static> {
    let mut strategy = strategy("data_parallel", &sgd().devices(devices)).unwrap();
    strategy.setup(&ModelHandle::new(Linear(fault)), None, Stage::Fit).unwrap();
    strategy
}

fn train(strategy: &mut Strategy, batch: impl Batch) -> Result<(Tree, Updated)> {
    strategy.train_batch(batch, Position::default(), Some(Update::new(0.1)))
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
    assert_eq!(root_cause(&error).downcast_ref(), Some(&DiskGone(7)));
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
    let folder = Folder::new("no-plugin");
    let file = folder.join("text.so");
    std::fs::write(&file, "no ELF").unwrap();
    let error = Plugin::load(&file).err().unwrap();
    contains(&error.chain(), &["text.so", "is no Stratagem plugin"]);
    std::fs::copy(plugin_file("data_parallel"), &file).unwrap();
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 3]).unwrap();
    contains(&Plugin::load(&file).err().unwrap().chain(), &["text.so", "cut off"]);
    plugin("data_parallel"); // with its LibTorch
    let notes: [(&str, &str, &[&str]); 3] = [
        ("\"major\": ", "2", &["built for ABI 2.0", "speaks 1.0 to 1."]),
        ("\"min_minor\": ", "9", &["built for ABI 1.9", "speaks 1.0 to 1."]),
        ("\"libtorch\": \"", "0", &["was built with LibTorch 0.", "already holds LibTorch"]),
    ];
    for (key, digit, words) in notes {
        let mut other = whole.clone();
        let at = whole.windows(key.len()).position(|part| part == key.as_bytes()).expect("a note as JSON") + key.len();
        other[at] = digit.as_bytes()[0];
        let file = folder.join("other.so");
        std::fs::write(&file, other).unwrap();
        let error = Plugin::load(&file).err().expect(key);
        assert_eq!(error.code(), Code::FailedPrecondition);
        contains(&error.chain(), words);
    }

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
fn a_flag_that_is_set_and_a_deadline_that_has_passed_end_a_call_and_the_instance_goes_on() {
    let mut strategy = set_up(Fault::None, 2);
    strategy.set_cancel(Some(Arc::new(AtomicU32::new(1))));
    assert_eq!(train(&mut strategy, batch(10)).unwrap_err().code(), Code::Cancelled);
    strategy.set_cancel(Some(Arc::new(AtomicU32::new(0))));
    train(&mut strategy, batch(10)).unwrap();
    strategy.set_timeout(Some(Duration::ZERO));
    assert_eq!(train(&mut strategy, batch(10)).unwrap_err().code(), Code::DeadlineExceeded);
    strategy.set_timeout(Some(Duration::MAX));
    train(&mut strategy, batch(10)).unwrap();
}

/// What is to end a call: done when the model's step is waiting.
type End = Box<dyn FnOnce() + Send>;

#[test]
fn a_deadline_a_cancel_flag_and_an_abort_end_a_call_whose_step_waits() {
    let ends: [(Code, fn(&mut Strategy) -> End); 3] = [
        (Code::DeadlineExceeded, |strategy| {
            strategy.set_timeout(Some(Duration::from_millis(200)));
            Box::new(|| {})
        }),
        (Code::Cancelled, |strategy| {
            let flag = Arc::new(AtomicU32::new(0));
            strategy.set_cancel(Some(flag.clone()));
            Box::new(move || flag.store(1, SeqCst))
        }),
        (Code::Aborted, |strategy| {
            let abort = strategy.abort_handle();
            Box::new(move || abort.abort())
        }),
    ];
    for (code, prepare) in ends {
        let ((waits, is_waiting), (let_go, gate)) = (mpsc::channel(), mpsc::channel());
        let gate = Mutex::new(gate);
        let mut plane = Plane::new();
        plane.on_step = Arc::new(move |context| {
            if context.replica == 0 {
                return Ok(()); // the caller's own thread
            }
            let _ = waits.send(());
            let is_let_go = gate.lock().unwrap().recv_timeout(Duration::from_secs(20));
            is_let_go.map_err(|_| Error::new(Code::Unavailable, "nothing has ended the call"))
        });
        let mut strategy = strategy("data_parallel", &sgd().devices(2)).unwrap();
        strategy.setup(&plane.handle(), None, Stage::Fit).unwrap();
        let (end, abort) = (prepare(&mut strategy), strategy.abort_handle());
        let ender = std::thread::spawn(move || is_waiting.recv().map(|()| end()));
        let error = train(&mut strategy, rows()).unwrap_err();
        assert_eq!(error.code(), code, "{error:?}");
        contains(&error.chain(), &["replica 1"]);
        assert!(error.is_draining() && strategy.status().unwrap().state == State::Draining, "its step still waits: {error:?}");
        let_go.send(()).unwrap();
        ender.join().unwrap().unwrap();
        drop(strategy);
        abort.abort(); // there is nothing to abort any more
    }
}

/// A source of an error, whose drop panics.
#[derive(Debug)]
struct Stubborn(Arc<AtomicU32>);
impl std::fmt::Display for Stubborn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("stubborn")
    }
}
impl std::error::Error for Stubborn {}
impl Drop for Stubborn {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
        panic!("an error that is not to be dropped");
    }
}

#[test]
fn a_panic_in_the_drop_of_an_error_that_c_lets_go_goes_no_further() {
    let (num_dropped, mut plane) = (Arc::new(AtomicU32::new(0)), Plane::new());
    let counter = num_dropped.clone();
    plane.on_step = Arc::new(move |_| Err(Error::new(Code::Unavailable, "no step").with_source(Stubborn(counter.clone()))));
    let mut strategy = strategy("data_parallel", &sgd().devices(2)).unwrap();
    strategy.setup(&plane.handle(), None, Stage::Fit).unwrap();
    let error = train(&mut strategy, rows()).unwrap_err(); // that of one replica; the other's goes
    contains(&error.chain(), &["no step", "stubborn"]);
    std::mem::forget(error);
    drop(strategy);
    assert_eq!(num_dropped.load(SeqCst), 1);
}

/// rustdoc doesn't look at the code of a compiler's error: what keeps the examples from compiling is told by the ones before them, which
/// do, of the same lines in another order, or once less.
#[test]
fn an_example_that_must_not_compile_has_the_lines_of_one_that_does() {
    let mut num_refused = 0;
    for file in ["session.rs", "strategy.rs"] {
        let text = std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file)).unwrap();
        let docs: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("///")).collect();
        let docs = docs.join("\n");
        let blocks: Vec<&str> = docs.split("```").skip(1).step_by(2).collect();
        // Without the fence's own line, comments, and the function's name.
        let lines = |block: &str| {
            let code = block.lines().skip(1).map(|line| line.split(" // ").next().unwrap().trim());
            let code = code.map(|line| if line.starts_with("fn ") { &line[line.find('(').unwrap()..] } else { line });
            code.map(str::to_owned).collect::<std::collections::BTreeSet<_>>()
        };
        for (index, refused) in blocks.iter().enumerate().filter(|(_, block)| block.starts_with("compile_fail")) {
            assert_eq!(lines(refused), lines(blocks[index - 1]), "{file}");
            num_refused += 1;
        }
    }
    assert_eq!(num_refused, 5);
}

/// Compiles where the type has none of the traits: with one of them, `can` has more than one meaning.
macro_rules! assert_neither_send_nor_sync {
    ($type:ty) => {{
        struct IsSend;
        struct IsSync;
        trait AmbiguousIf<Marker> {
            fn can() {}
        }
        impl<T: ?Sized> AmbiguousIf<()> for T {}
        impl<T: ?Sized + Send> AmbiguousIf<IsSend> for T {}
        impl<T: ?Sized + Sync> AmbiguousIf<IsSync> for T {}
        <$type>::can()
    }};
}

#[test]
fn what_is_shared_between_threads_is_what_the_tags_allow() {
    assert_neither_send_nor_sync!(Sink<'_>);
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
