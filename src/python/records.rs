//! Conversion of the profile's Python dataclasses to records of this crate.

use std::collections::HashMap;

use pyo3::prelude::*;

use super::to_py_err;
use crate::cost::TypeTimes;
use crate::error::{Error, Result};
use crate::model::graph::{Graph, Layer, Measurement, TiedWeight};

/// Mirror of `hpgo.model.profile.Layer`.
#[derive(FromPyObject)]
struct LayerRecord {
    id: String,
    name: String,
    forward_s: Vec<f64>,
    backward_s: Vec<f64>,
    input_gradient_s: Option<Vec<f64>>,
    weight_gradient_s: Option<Vec<f64>>,
    activation_bytes: Vec<f64>,
    parameter_bytes: f64,
    frozen_bytes: f64,
    saved_bytes: Option<Vec<f64>>,
    times_by_type: Vec<TypeTimesRecord>,
}

/// Mirror of `hpgo.model.profile.TypeTimes`.
#[derive(FromPyObject)]
struct TypeTimesRecord {
    forward_s: Vec<f64>,
    backward_s: Vec<f64>,
    input_gradient_s: Option<Vec<f64>>,
    weight_gradient_s: Option<Vec<f64>>,
}

/// Mirror of `hpgo.model.profile.TiedWeight`.
#[derive(FromPyObject)]
struct TiedWeightRecord {
    layers: Vec<String>,
    parameter_bytes: f64,
}

/// Mirror of `hpgo.model.profile.Profile`.
#[derive(FromPyObject)]
pub(super) struct ProfileRecord {
    batch_sizes: Vec<u32>,
    layers: Vec<LayerRecord>,
    edges: Vec<(String, String)>,
    tied_weights: Vec<TiedWeightRecord>,
}

/// Returns the checked layer graph of an `hpgo.Profile`.
///
/// # Errors
/// `ProfileError` with the layer or edge that is invalid.
pub(super) fn graph(profile: &Bound<'_, PyAny>) -> PyResult<Graph> {
    let record: ProfileRecord = profile.extract()?;
    record.try_into().map_err(|error| to_py_err(profile.py(), &error))
}

impl ProfileRecord {
    /// Returns the times of each device type, in the order of the layers' lists.
    ///
    /// # Errors
    /// Returns [`Error::Profile`] that names a layer with another number of types or measurements than the first layer.
    pub(super) fn times_by_type(&self) -> Result<Vec<TypeTimes>> {
        let types = self.layers.first().map_or(0, |layer| layer.times_by_type.len());
        let at_size = |layer: &LayerRecord, of_type: &TypeTimesRecord| -> Result<Vec<Measurement>> {
            let halves = of_type.input_gradient_s.as_ref().zip(of_type.weight_gradient_s.as_ref());
            let one = |at: usize| {
                Some(Measurement {
                    forward_s: *of_type.forward_s.get(at)?,
                    backward_s: *of_type.backward_s.get(at)?,
                    halves_s: match halves {
                        Some((inputs, weights)) => Some((*inputs.get(at)?, *weights.get(at)?)),
                        None => None,
                    },
                    ..Measurement::default()
                })
            };
            (0..self.batch_sizes.len()).map(one).collect::<Option<_>>().ok_or_else(|| {
                Error::profile(
                    format!("layer `{}` has fewer times of a device type than batch sizes", layer.id),
                    "give one number for each batch size",
                )
            })
        };
        (0..types)
            .map(|at| {
                let of_layer = |layer: &LayerRecord| match layer.times_by_type.get(at) {
                    Some(of_type) => at_size(layer, of_type),
                    None => Err(Error::profile(
                        format!("layer `{}` has times of fewer device types than the first layer", layer.id),
                        "give times of the same types for all layers",
                    )),
                };
                self.layers.iter().map(of_layer).collect()
            })
            .collect()
    }
}

impl TryFrom<ProfileRecord> for Graph {
    type Error = Error;

    fn try_from(record: ProfileRecord) -> Result<Self> {
        let index: HashMap<&str, usize> =
            record.layers.iter().enumerate().map(|(at, layer)| (layer.id.as_str(), at)).collect();
        // Python names layers by id, the crate by index. Resolve all names here, once.
        let end = |id: &str| {
            index.get(id).copied().ok_or_else(|| {
                Error::profile(
                    format!("an edge or a tied weight names layer `{id}`, but the profile has no such layer"),
                    "name layers by their ids",
                )
            })
        };
        let edges = record.edges.iter().map(|(from, to)| Ok((end(from)?, end(to)?))).collect::<Result<_>>()?;
        let tie = |tie: &TiedWeightRecord| {
            let layers = tie.layers.iter().map(|id| end(id)).collect::<Result<_>>()?;
            Ok(TiedWeight { layers, bytes: tie.parameter_bytes })
        };
        let tied_weights = record.tied_weights.iter().map(tie).collect::<Result<_>>()?;
        let layers =
            record.layers.into_iter().map(|layer| layer_of(layer, record.batch_sizes.len())).collect::<Result<_>>()?;
        let graph = Self { batch_sizes: record.batch_sizes, layers, edges, tied_weights };
        graph.check()?;
        Ok(graph)
    }
}

fn layer_of(record: LayerRecord, batch_sizes: usize) -> Result<Layer> {
    // Without its own numbers, a layer saves its output for the backward pass.
    let saved_bytes = record.saved_bytes.as_ref().unwrap_or(&record.activation_bytes);
    let halves = record.input_gradient_s.as_ref().zip(record.weight_gradient_s.as_ref());
    // Check all lengths first, because the conversion below indexes every list by batch size.
    let always = [&record.forward_s, &record.backward_s, &record.activation_bytes, saved_bytes];
    for numbers in always.into_iter().chain(halves.into_iter().flat_map(|(inputs, weights)| [inputs, weights])) {
        if numbers.len() != batch_sizes {
            return Err(Error::profile(
                format!(
                    "layer `{}` has {} numbers, but the profile has {batch_sizes} batch sizes",
                    record.id,
                    numbers.len()
                ),
                "give one number for each batch size",
            ));
        }
    }
    let measured = (0..batch_sizes)
        .map(|at| Measurement {
            forward_s: record.forward_s[at],
            backward_s: record.backward_s[at],
            halves_s: halves.map(|(inputs, weights)| (inputs[at], weights[at])),
            activation_bytes: record.activation_bytes[at],
            saved_bytes: saved_bytes[at],
        })
        .collect();
    let LayerRecord { name, id, parameter_bytes, frozen_bytes, .. } = record;
    Ok(Layer { name, id, parameter_bytes, frozen_bytes, measured })
}
