//! Cut points and measured values for Python.

use pyo3::prelude::*;
use pyo3::types::PyModule;

use super::{records, to_py_err};
use crate::cost::Interpolation;
use crate::error::Error;
use crate::model::order;
use crate::model::states::{CutPoints, Cuts};

/// States times layers: half a gigabyte.
const MOST_LISTED: usize = 100_000_000;

/// Layers inside; then forward and backward seconds, parameter, saved and boundary bytes for each batch size.
type State = (Vec<usize>, Vec<(f64, f64, f64, f64, f64)>);

/// Why there is but one order of layers, if so, and the states.
#[pyfunction]
fn states(py: Python<'_>, profile: &Bound<'_, PyAny>, bound: usize) -> PyResult<(Option<String>, Vec<State>)> {
    let graph = records::graph(profile)?;
    let found = py.detach(|| CutPoints::of(&graph, bound)).map_err(|error| to_py_err(py, &error))?;
    if found.len().saturating_mul(graph.layers.len()) > MOST_LISTED {
        let error = Error::argument(
            format!("the {} cut points of {} layers are too many to list", found.len(), graph.layers.len()),
            "profile larger parts of the model as one layer; `hpgo.plan` needs no such list",
        );
        return Err(to_py_err(py, &error));
    }
    let why = match found.cuts() {
        Cuts::Exact => None,
        Cuts::Fewer { why } | Cuts::LinearOrder { why } => Some(why.clone()),
    };
    let state = |at: usize| {
        let totals = (0..graph.batch_sizes.len()).map(|batch| {
            let sum = found.totals(at, batch);
            (sum.forward_s, sum.backward_s, sum.parameter_bytes, sum.saved_bytes, sum.boundary_bytes)
        });
        (found.layers_between(0, at), totals.collect())
    };
    Ok((why, (0..found.len()).map(state).collect()))
}

/// Indices of layers in the order in which plans price and list them.
#[pyfunction]
fn layer_order(py: Python<'_>, profile: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let graph = records::graph(profile)?;
    py.detach(|| order::of(&graph)).map_err(|error| to_py_err(py, &error))
}

/// A measured value for `batch_size` samples: on the line between the nearest two of `sizes`, or in proportion beyond them.
/// `sizes` ascend, and have one of `values` each.
#[pyfunction]
fn at_batch(sizes: Vec<f64>, values: Vec<f64>, batch_size: f64) -> f64 {
    Interpolation::new(&sizes, batch_size).of(&values)
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(at_batch, module)?)?;
    module.add_function(wrap_pyfunction!(layer_order, module)?)?;
    module.add_function(wrap_pyfunction!(states, module)?)
}
