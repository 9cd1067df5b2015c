//! Python bindings. Each function converts its arguments, calls the crate once, and converts the result back.
//!
//! Searches run under [`watched`], so that Ctrl-C stops them at once and the progress callback is called. Short calls
//! only release the interpreter lock with `py.detach`.

#![allow(clippy::needless_pass_by_value, reason = "PyO3 hands arguments over by value")]

mod chain;
mod legacy;
mod plan_records;
mod records;
mod schedule;
mod session;
mod simulate;
mod states;

use std::num::NonZero;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyModule;

use crate::control::Control;
use crate::error::{Error, Result};

/// Turns an [`Error`] into the exception class of `hpgo.errors` that a user can catch.
fn to_py_err(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error {
        Error::Profile { .. } => "ProfileError",
        Error::Cluster { .. } => "ClusterError",
        Error::Argument { .. } => "ArgumentError",
        Error::Infeasible { .. } => "InfeasibleError",
        Error::Schedule { .. } => "ScheduleError",
        Error::TimedOut { .. } => "TimeLimitError",
        Error::Cancelled => return PyKeyboardInterrupt::new_err(()),
    };
    // The exception classes are defined in Python, so that users can import and document them there.
    let built = PyModule::import(py, "hpgo.errors")
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call1((error.to_string(), error.hint())));
    match built {
        Ok(exception) => PyErr::from_value(exception),
        Err(import_failed) => import_failed,
    }
}

/// Runs `work` with a thread pool for its parallel parts. The pool ends with the call.
///
/// A global pool would be missing in a child process that Python forks, and parallel work in the child would wait for
/// it forever.
fn with_own_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let mut threads = rayon::ThreadPoolBuilder::new();
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        threads = threads.num_threads(cores.min(MAX_THREADS));
    }
    match threads.build() {
        Ok(pool) => pool.install(work),
        Err(_) => work(), // The system gives no more threads. The caller's thread is enough.
    }
}

/// Largest number of threads for a search. Searches have about this many parts that can run in parallel.
const MAX_THREADS: usize = 16;

/// Runs `work` on its own thread without the interpreter lock.
///
/// While it runs, the calling thread wakes every 20 ms to check for Ctrl-C, and every 100 ms to call
/// `progress(best_s, lower_bound_s)`. An exception from either cancels the work, and is raised when the work has
/// returned. With `keep_partial`, Ctrl-C returns the best result so far instead of raising.
fn watched<T: Send>(
    py: Python<'_>,
    control: &Control,
    progress: Option<&Py<PyAny>>,
    keep_partial: bool,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    let (sender, receiver) = channel();
    let receiver = Mutex::new(receiver); // `detach` needs `Sync`, which a receiver alone is not.
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            // Sending can't fail: the receiver outlives the worker. If `work` panics, the sender is dropped, which ends
            // the loop below.
            let _ = sender.send(with_own_threads(work));
        });
        let mut failure = None;
        let mut ticks = 0_u32;
        let answer = loop {
            let waited = py.detach(|| {
                receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(Duration::from_millis(20))
            });
            match waited {
                Ok(answer) => break answer,
                Err(RecvTimeoutError::Disconnected) => {
                    let panic = worker.join().expect_err("the sender is dropped unsent only by a panic");
                    let text = panic
                        .downcast_ref::<String>()
                        .map(String::as_str)
                        .or_else(|| panic.downcast_ref::<&str>().copied())
                        .unwrap_or("no message");
                    return Err(PyRuntimeError::new_err(format!("a defect in hpgo: {text}")));
                }
                Err(RecvTimeoutError::Timeout) => {
                    ticks += 1;
                    let seen = py.check_signals().and_then(|()| match progress {
                        Some(callback) if ticks.is_multiple_of(5) => {
                            let now = control.progress();
                            callback.call1(py, (now.best_s, now.lower_bound_s)).map(drop)
                        }
                        _ => Ok(()),
                    });
                    // Don't return yet: the worker borrows from this frame, and stops only at its next check of
                    // `control`.
                    if let Err(raised) = seen {
                        control.cancel();
                        failure.get_or_insert(raised);
                    }
                }
            }
        };
        match (answer, failure) {
            (answer, None) => answer.map_err(|error| to_py_err(py, &error)),
            // Only Ctrl-C asks for the result so far. An exception of the callback is a fault that the caller must see.
            (Ok(best_so_far), Some(raised)) if keep_partial && raised.is_instance_of::<PyKeyboardInterrupt>(py) => {
                Ok(best_so_far)
            }
            (_, Some(raised)) => Err(raised),
        }
    })
}

/// Defines the native module of `hpgo`. Users call the Python package around it.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    chain::register(module)?;
    legacy::register(module)?;
    session::register(module)?;
    schedule::register(module)?;
    simulate::register(module)?;
    states::register(module)?;
    // PyO3 lists what it adds in `__all__`. The stub file would have to repeat that list, so remove it.
    module.dict().del_item("__all__")?;
    Ok(())
}
