//! Python bindings of the chain planner, which splits a model over a row of unequal hosts.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyModule;

use super::{to_py_err, watched};
use crate::control::Control;
use crate::error::Error;
use crate::planner::chain::{self, Chain, ChainPlan, Objective};

/// Returns the best plan for the fields of `hpgo.planning.chain.records.Chain`. Ctrl-C returns the best plan so far.
#[pyfunction]
fn partition_chain(
    py: Python<'_>,
    chain: Chain,
    objective: &str,
    max_interval_s: Option<f64>,
    time_limit_s: Option<f64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<ChainPlan> {
    let objective = match objective {
        "throughput" => Objective::Throughput,
        "latency" => Objective::Latency,
        "hosts" => Objective::Hosts,
        "bits" => Objective::Bits,
        other => {
            let error = Error::argument(
                format!("there is no objective `{other}`"),
                "choose throughput, latency, hosts or bits",
            );
            return Err(to_py_err(py, &error));
        }
    };
    let limit = match time_limit_s.map(Duration::try_from_secs_f64) {
        None => None,
        Some(Ok(limit)) => Some(limit),
        Some(Err(_)) => {
            let error = Error::argument("the time limit is not a number of seconds from 0", "give for instance 60");
            return Err(to_py_err(py, &error));
        }
    };
    let control = Control::with_deadline(limit);
    // Keep the best plan on Ctrl-C: it is valid at any time, only its bound is weaker.
    watched(py, &control, progress.as_ref(), true, || chain::partition(&chain, objective, max_interval_s, &control))
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(partition_chain, module)?)
}
