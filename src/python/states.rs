//! Python bindings of cut points and of interpolation between measured batch sizes.

use pyo3::prelude::*;
use pyo3::types::PyModule;

use super::{records, to_py_err};
use crate::cost::Interpolation;
use crate::error::Error;
use crate::model::order;
use crate::model::states::{CutPoints, Cuts};

/// Limit on cut points times layers. More would take over half a gigabyte.
const MAX_LISTED: usize = 100_000_000;

/// A cut point: indices of the layers before it, then for each batch size forward and backward seconds, and the bytes
/// of parameters, saved activations and boundary tensors.
type State = (Vec<usize>, Vec<(f64, f64, f64, f64, f64)>);

/// Returns the cut points. The text before them states why only one order of layers is used, and is `None` if all
/// orders are.
#[pyfunction]
fn states(py: Python<'_>, profile: &Bound<'_, PyAny>, bound: usize) -> PyResult<(Option<String>, Vec<State>)> {
    let graph = records::graph(profile)?;
    let found = py.detach(|| CutPoints::of(&graph, bound)).map_err(|error| to_py_err(py, &error))?;
    // The number of cut points is known before their layers are listed, so refuse before the memory is used.
    if found.len().saturating_mul(graph.layers.len()) > MAX_LISTED {
        let error = Error::argument(
            format!(
                "there are {} cut points of {} layers, but the list would take over half a gigabyte",
                found.len(),
                graph.layers.len()
            ),
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

/// Returns the indices of layers in the order in which plans evaluate and list them.
#[pyfunction]
fn layer_order(py: Python<'_>, profile: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let graph = records::graph(profile)?;
    py.detach(|| order::of(&graph)).map_err(|error| to_py_err(py, &error))
}

/// Returns a measured value for `batch_size` samples: interpolated between the nearest two of `sizes`, or in proportion
/// beyond them. `sizes` must ascend and have one of `values` each.
#[pyfunction]
fn at_batch(sizes: Vec<f64>, values: Vec<f64>, batch_size: f64) -> f64 {
    Interpolation::new(&sizes, batch_size).of(&values)
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(at_batch, module)?)?;
    module.add_function(wrap_pyfunction!(layer_order, module)?)?;
    module.add_function(wrap_pyfunction!(states, module)?)
}
