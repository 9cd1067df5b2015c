//! Where a model may be cut: the down-sets of its layer graph, with what lies inside and what crosses the edge.
//!
//! A cut puts some layers before it and the rest behind it, and no edge may lead back: what lies before a cut is a
//! *down-set* (order ideal) of the graph, which PipeDream calls an antichain state. Stages are differences of nested
//! down-sets. A chain has as many as layers; a branching graph may have astronomically many, so
//!
//! 1. layers that cost nothing follow a neighbour where that can't make a cut dearer (`units`);
//! 2. all down-sets of what is left are listed, up to a bound (`walk::all`);
//! 3. beyond the bound one good linear order takes their place (`walk::best_order`), and [`Cuts`] says so.
//!
//! A search for plans looks closer ([`CutPoints::for_plans`]): where a layer that takes no time saves its bytes decides what
//! fits.
//!
//! Layers are numbered by their *position* in one order of the graph that doesn't depend on its file (`order`).

mod set;
mod sums;
mod units;
mod walk;

pub(crate) use set::BitSet;
pub use sums::CutSums;

use super::order;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::model::graph::Graph;
use set::StateSets;
use sums::{LayerReaders, totals_in_order, totals_of};
use units::{Joined, LayerUnit};

/// Down-sets that [`CutPoints::of`] lists before it falls back to one order, unless told otherwise.
pub const DEFAULT_BOUND: usize = 10_000;
/// Down-sets of single layers that a search takes as they are, whatever might be joined.
const FEW: usize = 256;
/// By so much may cut points multiply to tell where layers that take no time save their bytes, if they aren't few.
const WORTH: usize = 2;
/// Cuts in a row that a search tells apart.
const MOST_IN_A_ROW: usize = 2_000;
/// Layers of all down-sets together that a search keeps in mind.
const MOST_LISTED: usize = 20_000_000;

/// Whether a set of states holds every useful cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cuts {
    /// Every down-set, but for layers that follow a neighbour.
    Exact,
    /// Not those that part layers that take no time from a neighbour, or not every one of a long row.
    Fewer {
        /// Why, for the report.
        why: String,
    },
    /// The prefixes of one topological order: a plan is optimal for that order only.
    LinearOrder {
        /// Why, for the report.
        why: String,
    },
}

/// The cut points of a graph. State 0 is empty and the last one holds every layer; a state comes after all its subsets.
#[derive(Debug, Clone, PartialEq)]
pub struct CutPoints {
    cuts: Cuts,
    /// Layers in topological order; *position* k stands for `order[k]`.
    order: Vec<usize>,
    sets: StateSets,
    /// `totals[state * batch_sizes + batch]`.
    totals: Vec<CutSums>,
    batch_sizes: usize,
    units: Vec<LayerUnit>,
}

impl CutPoints {
    /// The cut points of `graph`: all down-sets if they are at most `bound`, else the best single order found.
    ///
    /// # Errors
    /// [`Error::Profile`] if the graph has no layers, has a cycle, or numbers that are not finite and positive.
    ///
    /// ```
    /// use hpgo::model::graph::{Graph, Layer, Measurement};
    /// use hpgo::model::states::{DEFAULT_BOUND, CutPoints};
    ///
    /// let measured = vec![Measurement { forward_s: 1.0, activation_bytes: 8.0, ..Measurement::default() }];
    /// let layer = Layer { name: "linear".into(), id: "0".into(), parameter_bytes: 4.0, measured };
    /// let graph = Graph { batch_sizes: vec![1], layers: vec![layer; 3], edges: vec![(0, 1), (1, 2)], ties: vec![] };
    /// let states = CutPoints::of(&graph, DEFAULT_BOUND)?;
    /// assert_eq!(states.len(), 4); // nothing, one, two, all three layers
    /// assert_eq!(states.totals(2, 0).boundary_bytes, 8.0);
    /// assert_eq!(states.layers_between(1, 3), [1, 2]);
    /// # Ok::<(), hpgo::Error>(())
    /// ```
    pub fn of(graph: &Graph, bound: usize) -> Result<Self> {
        let (order, wires) = checked(graph)?;
        let control = Control::default();
        let units = units::of(graph, &order, &wires, Joined::Free);
        match listed(&units, order.len(), bound, &control)? {
            Some(sets) => Self::with(graph, order, &wires, units, sets, Cuts::Exact, &control),
            None => Self::of_one_order(graph, order, &wires, units, bound, &control),
        }
    }

    /// The cut points that a search for plans tells apart: those of a small graph, whatever might be joined; of a larger
    /// one also those that part layers without time from a neighbour where they save bytes, unless that multiplies them
    /// too much; of a long row only some.
    ///
    /// # Errors
    /// As [`CutPoints::of`]; that of `control`, if it was stopped.
    pub fn for_plans(graph: &Graph, control: &Control) -> Result<Self> {
        Self::for_plans_keeping(graph, &[], control)
    }

    /// As [`CutPoints::for_plans`], without the cuts that separate layers of one of the groups in `together`.
    ///
    /// # Errors
    /// As [`CutPoints::for_plans`].
    pub fn for_plans_keeping(graph: &Graph, together: &[Vec<usize>], control: &Control) -> Result<Self> {
        let (order, wires) = checked(graph)?;
        let layers = order.len();
        let bound = DEFAULT_BOUND.min(MOST_LISTED / layers);
        let joined = |joined| units::of(graph, &order, &wires, joined);
        let apart = joined(Joined::Nothing);
        if let Some(sets) = listed(&apart, layers, FEW, control)? {
            return Self::with(graph, order, &wires, apart, sets, Cuts::Exact, control)?
                .keeping(together)
                .thinned(control);
        }
        let (units, fewer_units) = (joined(Joined::Unsaved), joined(Joined::Free));
        let fewer = if units == fewer_units { None } else { listed(&fewer_units, layers, bound, control)? };
        let most = fewer.as_ref().map_or(bound, |fewer| bound.min(FEW.max(WORTH * fewer.len())));
        let states = if let Some(sets) = listed(&units, layers, most, control)? {
            Self::with(graph, order, &wires, units, sets, Cuts::Exact, control)?
        } else if let Some(sets) = fewer {
            let why = format!(
                "{} cut points: layers that take no time stay with a neighbour, whatever they save",
                sets.len()
            );
            Self::with(graph, order, &wires, fewer_units, sets, Cuts::Fewer { why }, control)?
        } else {
            Self::of_one_order(graph, order, &wires, units, bound, control)?
        };
        states.keeping(together).thinned(control)
    }

    fn of_one_order(
        graph: &Graph,
        order: Vec<usize>,
        wires: &LayerReaders,
        units: Vec<LayerUnit>,
        bound: usize,
        control: &Control,
    ) -> Result<Self> {
        let sets = StateSets::row(&walk::best_order(graph, &order, wires, &units, control)?, order.len());
        let why = format!(
            "the graph has more than {bound} cut points; plans use the {} of one order of its layers",
            sets.len()
        );
        Self::with(graph, order, wires, units, sets, Cuts::LinearOrder { why }, control)
    }

    /// The cut points between given stages, first stage first: lists of layer indices that together hold every layer once.
    ///
    /// # Errors
    /// [`Error::Profile`] if the graph is not usable, [`Error::Argument`] if a layer is missing, unknown or repeated, or
    /// feeds a layer of an earlier stage.
    pub fn between(graph: &Graph, stages: &[Vec<usize>]) -> Result<Self> {
        let (order, wires) = checked(graph)?;
        let mut stage_of = vec![None; order.len()];
        for (stage, layers) in stages.iter().enumerate() {
            for &layer in layers {
                let known = stage_of.get_mut(layer).ok_or_else(|| {
                    Error::argument(
                        format!("stage {stage} names layer {layer}, but there are {} layers", order.len()),
                        "layers are numbered from 0",
                    )
                })?;
                if let Some(other) = known.replace(stage) {
                    let name = &graph.layers[layer].name;
                    return Err(Error::argument(
                        if other == stage {
                            format!("stage {stage} names layer `{name}` twice")
                        } else {
                            format!("layer `{name}` is in stage {other} and in stage {stage}")
                        },
                        "each layer belongs to one stage, once",
                    ));
                }
            }
            if layers.is_empty() {
                return Err(Error::argument(format!("stage {stage} has no layers"), "leave it out"));
            }
        }
        if let Some(layer) = stage_of.iter().position(Option::is_none) {
            let name = &graph.layers[layer].name;
            return Err(Error::argument(format!("layer `{name}` is in no stage"), "each layer belongs to one stage"));
        }
        if let Some(&(from, to)) = graph.edges.iter().find(|&&(from, to)| stage_of[from] > stage_of[to]) {
            return Err(Error::argument(
                format!(
                    "layer `{}` feeds layer `{}` of an earlier stage",
                    graph.layers[from].name, graph.layers[to].name
                ),
                "data flows from each stage to later ones only",
            ));
        }
        let enters = order.iter().map(|&layer| stage_of[layer].map_or(0, |stage| stage as u32 + 1)).collect();
        let sets = StateSets::Row { enters, states: stages.len() + 1 };
        Self::with(graph, order, &wires, Vec::new(), sets, Cuts::Exact, &Control::default())
    }

    fn with(
        graph: &Graph,
        order: Vec<usize>,
        wires: &LayerReaders,
        units: Vec<LayerUnit>,
        sets: StateSets,
        cuts: Cuts,
        control: &Control,
    ) -> Result<Self> {
        let totals = match &sets {
            StateSets::Row { enters, states } if enters.is_sorted() => {
                totals_in_order(graph, &order, wires, enters, *states, control)?
            }
            StateSets::Row { enters, states } => {
                let is_inside = |state: usize, position: usize| enters[position] as usize <= state;
                totals_of(graph, wires, &order, *states, is_inside, control)?
            }
            StateSets::Listed(sets) => {
                let is_inside = |state: usize, position: usize| sets[state].contains(position);
                totals_of(graph, wires, &order, sets.len(), is_inside, control)?
            }
        };
        Ok(Self { cuts, order, sets, totals, batch_sizes: graph.batch_sizes.len(), units })
    }

    /// Whether these are all cut points or one order's.
    #[must_use]
    pub fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    /// Number of states, the empty and the full one included.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there are always at least two")]
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    /// Layers of the graph in the topological order used here.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Sums over the layers of `state`, at the profile's batch size with index `batch`.
    #[must_use]
    pub fn totals(&self, state: usize, batch: usize) -> &CutSums {
        &self.totals[state * self.batch_sizes + batch]
    }

    /// Whether every layer of `inner` is in `outer`; states need be compared only where `inner <= outer`.
    #[must_use]
    pub fn is_subset(&self, inner: usize, outer: usize) -> bool {
        match &self.sets {
            StateSets::Row { .. } => inner <= outer,
            StateSets::Listed(sets) => sets[inner].is_subset(&sets[outer]),
        }
    }

    /// Layers of `outer` that are not in `inner`, in topological order: a stage, if `inner` is a subset.
    #[must_use]
    pub fn layers_between(&self, inner: usize, outer: usize) -> Vec<usize> {
        let is_between = |&position: &usize| match &self.sets {
            StateSets::Row { enters, .. } => (inner + 1..=outer).contains(&(enters[position] as usize)),
            StateSets::Listed(sets) => sets[outer].contains(position) && !sets[inner].contains(position),
        };
        (0..self.order.len()).filter(is_between).map(|position| self.order[position]).collect()
    }

    /// Whether the states are nested in each other, so that any two of them bound a stage.
    #[must_use]
    pub fn is_linear(&self) -> bool {
        matches!(self.sets, StateSets::Row { .. })
    }

    /// For each position the first state that holds it, if the states are nested in each other.
    pub(crate) fn enters(&self) -> Option<&[u32]> {
        match &self.sets {
            StateSets::Row { enters, .. } => Some(enters),
            StateSets::Listed(_) => None,
        }
    }

    /// The best single order: nested states from empty to full whose boundaries are smallest in sum.
    ///
    /// Numbers of states differ from those of `self`; [`Cuts::Exact`] stays only where nothing is lost.
    #[must_use]
    pub fn linear(&self) -> Self {
        let StateSets::Listed(sets) = &self.sets else { return self.clone() };
        let chain = walk::shortest_chain(sets, &self.units, |state| self.totals(state, 0).boundary_bytes);
        let why = format!("one order of the layers: {} of {} cut points", chain.len(), self.len());
        Self {
            cuts: Cuts::LinearOrder { why },
            order: self.order.clone(),
            sets: StateSets::listed(chain.iter().map(|&state| sets[state].clone()).collect()),
            totals: self.totals_at(&chain),
            batch_sizes: self.batch_sizes,
            units: self.units.clone(),
        }
    }

    fn totals_at(&self, states: &[usize]) -> Vec<CutSums> {
        let of = |&state: &usize| &self.totals[state * self.batch_sizes..(state + 1) * self.batch_sizes];
        states.iter().flat_map(of).copied().collect()
    }

    /// Without the states that hold some layers of a group and not all.
    fn keeping(self, together: &[Vec<usize>]) -> Self {
        if together.is_empty() {
            return self;
        }
        let mut position_of = vec![0; self.order.len()];
        for (position, &layer) in self.order.iter().enumerate() {
            position_of[layer] = position;
        }
        let is_inside = |state: usize, layer: usize| match &self.sets {
            StateSets::Row { enters, .. } => enters[position_of[layer]] as usize <= state,
            StateSets::Listed(sets) => sets[state].contains(position_of[layer]),
        };
        let splits = |state: usize, group: &Vec<usize>| {
            let inside = group.iter().filter(|&&layer| is_inside(state, layer)).count();
            inside > 0 && inside < group.len()
        };
        let kept: Vec<usize> =
            (0..self.len()).filter(|&state| !together.iter().any(|group| splits(state, group))).collect();
        let cuts = self.cuts.clone();
        self.only(&kept, cuts)
    }

    /// Only some of the states, both ends among them.
    fn only(self, kept: &[usize], cuts: Cuts) -> Self {
        let enter = |&state: &u32| kept.partition_point(|&kept| kept < state as usize) as u32;
        let sets = match &self.sets {
            StateSets::Row { enters, .. } => {
                StateSets::Row { enters: enters.iter().map(enter).collect(), states: kept.len() }
            }
            StateSets::Listed(sets) => StateSets::listed(kept.iter().map(|&state| sets[state].clone()).collect()),
        };
        Self {
            cuts,
            totals: self.totals_at(kept),
            sets,
            order: self.order,
            batch_sizes: self.batch_sizes,
            units: Vec::new(),
        }
    }

    /// Of a long row of cuts [`MOST_IN_A_ROW`]: so many parts of the model, about equal in time, bytes and layers, and in
    /// each of them the narrowest cut.
    fn thinned(self, control: &Control) -> Result<Self> {
        let states = self.len();
        if !self.is_linear() || states <= MOST_IN_A_ROW {
            return Ok(self);
        }
        let batch = self.batch_sizes - 1;
        let parts =
            |totals: &CutSums| [totals.forward_s + totals.backward_s, totals.parameter_bytes, totals.saved_bytes];
        let whole = parts(self.totals(states - 1, batch));
        let part_of = |state: usize| {
            let shares = parts(self.totals(state, batch)).into_iter().zip(whole);
            let share: f64 = shares.map(|(part, whole)| if whole > 0.0 { part / whole } else { 0.0 }).sum();
            let share = (share + state as f64 / (states - 1) as f64)
                / (1 + whole.iter().filter(|&&whole| whole > 0.0).count()) as f64;
            // Both ends are kept besides.
            (share * (MOST_IN_A_ROW - 3) as f64).floor()
        };
        let mut kept = vec![0];
        let mut narrowest: Option<usize> = None;
        for state in 1..states - 1 {
            control.check()?;
            match narrowest {
                Some(other) if part_of(other) >= part_of(state) => {
                    let bytes = |state| self.totals(state, batch).boundary_bytes;
                    if bytes(state) < bytes(other) {
                        narrowest = Some(state);
                    }
                }
                other => {
                    kept.extend(other);
                    narrowest = Some(state);
                }
            }
        }
        kept.extend(narrowest);
        kept.push(states - 1);
        let cuts = match &self.cuts {
            Cuts::LinearOrder { why } => {
                Cuts::LinearOrder { why: format!("{why}, {} of them in about equal steps", kept.len()) }
            }
            Cuts::Exact | Cuts::Fewer { .. } => Cuts::Fewer {
                why: format!("{} of {states} cut points, in about equal steps through the layers", kept.len()),
            },
        };
        Ok(self.only(&kept, cuts))
    }
}

/// The order of the layers of a graph that is usable, and who reads whose output.
fn checked(graph: &Graph) -> Result<(Vec<usize>, LayerReaders)> {
    graph.check()?;
    if graph.layers.is_empty() {
        return Err(Error::profile("the profile has no layers", "a profile needs at least one layer"));
    }
    let order = order::of(graph)?;
    let wires = LayerReaders::of(graph, &order);
    Ok((order, wires))
}

/// Every down-set that is a union of units, if they are at most `bound`; a row of them, however long.
fn listed(units: &[LayerUnit], layers: usize, bound: usize, control: &Control) -> Result<Option<StateSets>> {
    if let Some(row) = walk::row(units, layers) {
        return Ok(Some(StateSets::row(&row, layers)));
    }
    Ok(walk::all(units, layers, bound, control)?.map(StateSets::listed))
}
