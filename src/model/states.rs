//! The cut points of a model: the down-sets of its layer graph, with the sums inside and the bytes across each cut.
//!
//! A cut puts some layers before it and the rest behind it, and no edge may lead back. So the layers before a cut are a
//! *down-set* (order ideal) of the graph, which PipeDream calls an antichain state. Stages are differences of nested
//! down-sets. A chain has one down-set more than layers. A branching graph may have astronomically many, so
//!
//! 1. layers that cost nothing are joined to a neighbor where that cannot make a cut more expensive (`units`);
//! 2. all down-sets of the remaining graph are listed, up to a bound (`walk::all`);
//! 3. beyond the bound the prefixes of one good linear order are used (`walk::best_order`), and [`Cuts`] records it.
//!
//! A search for plans joins fewer layers ([`CutPoints::for_plans`]): where a layer without compute time saves
//! activations, its stage decides whether the plan fits.
//!
//! Layers are numbered by their *position* in one topological order that depends on the graph, not on its file
//! (`order`).

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

/// Default limit on the down-sets that [`CutPoints::of`] lists before it falls back to one order.
pub const DEFAULT_BOUND: usize = 10_000;
/// A search lists the down-sets of all single layers, with none joined, if they are at most this many. Not tuned.
const FEW: usize = 256;
/// Layers without time that save bytes are kept apart if that multiplies the cut points by at most this factor (or
/// leaves at most [`FEW`]).
///
/// PipeDream's profile of GNMT has 2,244 cut points with them apart and 39 without.
const WORTH: usize = 2;
/// Maximum number of nested cuts that a search distinguishes.
const MAX_NESTED_CUTS: usize = 2_000;
/// Memory limit of a search: maximum sum of the sizes of all down-sets, in layers. Not tuned.
const MAX_LISTED_LAYERS: usize = 20_000_000;

/// Whether a set of cut points contains every useful cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cuts {
    /// Every down-set, except where layers are joined to a neighbor without loss.
    Exact,
    /// Some cuts are missing: cuts between a neighbor and layers without compute time, or cuts of a very long chain.
    Fewer {
        /// Reason, as text for the report.
        why: String,
    },
    /// The prefixes of one topological order. An optimal plan is optimal only for that order.
    LinearOrder {
        /// Reason, as text for the report.
        why: String,
    },
}

/// The cut points (*states*) of a graph.
///
/// State 0 is empty and the last one holds every layer. A state comes after all its subsets.
#[derive(Debug, Clone, PartialEq)]
pub struct CutPoints {
    cuts: Cuts,
    /// Layers in topological order: *position* k stands for `order[k]`.
    order: Vec<usize>,
    sets: StateSets,
    /// Sums of each state at each batch size, at index `state * batch_sizes + batch`.
    totals: Vec<CutSums>,
    batch_sizes: usize,
    units: Vec<LayerUnit>,
}

impl CutPoints {
    /// Lists the cut points of `graph`: all down-sets if they are at most `bound`, else the best single order found.
    ///
    /// # Errors
    /// Returns [`Error::Profile`] if the graph has no layers, has a cycle, or has numbers that are negative or not
    /// finite.
    ///
    /// ```
    /// use hpgo::model::graph::{Graph, Layer, Measurement};
    /// use hpgo::model::states::{DEFAULT_BOUND, CutPoints};
    ///
    /// let measured = vec![Measurement { forward_s: 1.0, activation_bytes: 8.0, ..Measurement::default() }];
    /// let layer = Layer { name: "linear".into(), id: "0".into(), parameter_bytes: 4.0, measured, ..Layer::default() };
    /// let graph = Graph { batch_sizes: vec![1], layers: vec![layer; 3], edges: vec![(0, 1), (1, 2)], tied_weights: vec![] };
    /// let states = CutPoints::of(&graph, DEFAULT_BOUND)?;
    /// assert_eq!(states.len(), 4); // nothing, one, two, all three layers
    /// assert_eq!(states.totals(2, 0).boundary_bytes, 8.0);
    /// assert_eq!(states.layers_between(1, 3), [1, 2]);
    /// # Ok::<(), hpgo::Error>(())
    /// ```
    pub fn of(graph: &Graph, bound: usize) -> Result<Self> {
        let (order, readers) = checked(graph)?;
        let control = Control::default();
        let units = units::of(graph, &order, &readers, Joined::Free);
        match listed(&units, order.len(), bound, &control)? {
            Some(sets) => Self::with(graph, order, &readers, units, sets, Cuts::Exact, &control),
            None => Self::of_one_order(graph, order, &readers, units, bound, &control),
        }
    }

    /// Lists the cut points that a search for plans distinguishes.
    ///
    /// - A graph with at most `FEW` down-sets has all of them.
    /// - In a larger graph, layers that take no time and save nothing are joined to a neighbor. Layers that take no
    ///   time but save bytes are joined only if more than `FEW` cut points, and more than `WORTH` times the joined
    ///   number, would remain.
    /// - A long chain of cuts is thinned to `MAX_NESTED_CUTS`.
    ///
    /// # Errors
    /// Returns the errors of [`CutPoints::of`], and the error of `control` if it was stopped.
    pub fn for_plans(graph: &Graph, control: &Control) -> Result<Self> {
        Self::for_plans_keeping(graph, &[], control)
    }

    /// Returns the cut points of [`CutPoints::for_plans`] without cuts that separate layers of one of the groups in
    /// `together`.
    ///
    /// # Errors
    /// Returns the errors of [`CutPoints::for_plans`].
    pub fn for_plans_keeping(graph: &Graph, together: &[Vec<usize>], control: &Control) -> Result<Self> {
        let (order, readers) = checked(graph)?;
        let layers = order.len();
        // Every down-set lists its layers, so models with many layers may have fewer down-sets.
        let bound = DEFAULT_BOUND.min(MAX_LISTED_LAYERS / layers);
        let joined = |joined| units::of(graph, &order, &readers, joined);
        let apart = joined(Joined::Nothing);
        if let Some(sets) = listed(&apart, layers, FEW, control)? {
            return Self::with(graph, order, &readers, apart, sets, Cuts::Exact, control)?
                .keeping(together)
                .thinned(control);
        }
        // The smaller listing comes first, because its size decides how large the more precise one may become.
        let (units, fewer_units) = (joined(Joined::Unsaved), joined(Joined::Free));
        let fewer = if units == fewer_units { None } else { listed(&fewer_units, layers, bound, control)? };
        let max = fewer.as_ref().map_or(bound, |fewer| bound.min(FEW.max(WORTH * fewer.len())));
        let states = if let Some(sets) = listed(&units, layers, max, control)? {
            Self::with(graph, order, &readers, units, sets, Cuts::Exact, control)?
        } else if let Some(sets) = fewer {
            let why = format!(
                "{} cut points: layers that take no time stay with a neighbor, even if they save activations",
                sets.len()
            );
            Self::with(graph, order, &readers, fewer_units, sets, Cuts::Fewer { why }, control)?
        } else {
            Self::of_one_order(graph, order, &readers, units, bound, control)?
        };
        states.keeping(together).thinned(control)
    }

    fn of_one_order(
        graph: &Graph,
        order: Vec<usize>,
        readers: &LayerReaders,
        units: Vec<LayerUnit>,
        bound: usize,
        control: &Control,
    ) -> Result<Self> {
        let sets = StateSets::row(&walk::best_order(graph, &order, readers, &units, control)?, order.len());
        let why = format!(
            "the graph has more than {bound} cut points; plans use the {} of one order of its layers",
            sets.len()
        );
        Self::with(graph, order, readers, units, sets, Cuts::LinearOrder { why }, control)
    }

    /// Returns the cut points between given stages, first stage first.
    ///
    /// `stages` are lists of layer indices that together must hold every layer once.
    ///
    /// # Errors
    /// # Errors
    /// Returns [`Error::Profile`] if the graph is not usable, [`Error::Argument`] if a layer is missing, unknown or
    /// repeated, or
    /// feeds a layer of an earlier stage.
    pub fn between(graph: &Graph, stages: &[Vec<usize>]) -> Result<Self> {
        let (order, readers) = checked(graph)?;
        let mut stage_of = vec![None; order.len()];
        for (stage, layers) in stages.iter().enumerate() {
            for &layer in layers {
                let known = stage_of.get_mut(layer).ok_or_else(|| {
                    Error::argument(
                        format!("stage {stage} names layer {layer}, but there are {} layers", order.len()),
                        "number the layers from 0",
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
                        "name each layer in one stage, once",
                    ));
                }
            }
            if layers.is_empty() {
                return Err(Error::argument(format!("stage {stage} has no layers"), "remove the stage"));
            }
        }
        if let Some(layer) = stage_of.iter().position(Option::is_none) {
            let name = &graph.layers[layer].name;
            return Err(Error::argument(format!("layer `{name}` is in no stage"), "add it to a stage"));
        }
        if let Some(&(from, to)) = graph.edges.iter().find(|&&(from, to)| stage_of[from] > stage_of[to]) {
            return Err(Error::argument(
                format!(
                    "layer `{}` feeds layer `{}` of an earlier stage",
                    graph.layers[from].name, graph.layers[to].name
                ),
                "move one of the two layers, since data flows to later stages only",
            ));
        }
        // State s holds the first s stages, so a layer of stage s is inside from state s + 1 on.
        let enters = order.iter().map(|&layer| stage_of[layer].map_or(0, |stage| stage as u32 + 1)).collect();
        let sets = StateSets::Row { enters, states: stages.len() + 1 };
        Self::with(graph, order, &readers, Vec::new(), sets, Cuts::Exact, &Control::default())
    }

    fn with(
        graph: &Graph,
        order: Vec<usize>,
        readers: &LayerReaders,
        units: Vec<LayerUnit>,
        sets: StateSets,
        cuts: Cuts,
        control: &Control,
    ) -> Result<Self> {
        // Nested states in topological order need one pass over the layers. All others are summed state by state.
        let totals = match &sets {
            StateSets::Row { enters, states } if enters.is_sorted() => {
                totals_in_order(graph, &order, readers, enters, *states, control)?
            }
            StateSets::Row { enters, states } => {
                let is_inside = |state: usize, position: usize| enters[position] as usize <= state;
                totals_of(graph, readers, &order, *states, is_inside, control)?
            }
            StateSets::Listed(sets) => {
                let is_inside = |state: usize, position: usize| sets[state].contains(position);
                totals_of(graph, readers, &order, sets.len(), is_inside, control)?
            }
        };
        Ok(Self { cuts, order, sets, totals, batch_sizes: graph.batch_sizes.len(), units })
    }

    /// Returns whether these are all cut points, and the reason if not.
    #[must_use]
    pub fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    /// Returns the number of states, the empty and the full one included.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there are always at least two")]
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    /// Returns the layers of the graph in the topological order used here.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the sums over the layers of `state` at the profile's batch size with index `batch`.
    #[must_use]
    pub fn totals(&self, state: usize, batch: usize) -> &CutSums {
        &self.totals[state * self.batch_sizes + batch]
    }

    /// Returns whether every layer of `inner` is in `outer`. The answer is defined only for `inner <= outer`.
    #[must_use]
    pub fn is_subset(&self, inner: usize, outer: usize) -> bool {
        match &self.sets {
            StateSets::Row { .. } => inner <= outer,
            StateSets::Listed(sets) => sets[inner].is_subset(&sets[outer]),
        }
    }

    /// Returns the layers of `outer` that are not in `inner`, in topological order: a stage, if `inner` is a subset.
    #[must_use]
    pub fn layers_between(&self, inner: usize, outer: usize) -> Vec<usize> {
        let is_between = |&position: &usize| match &self.sets {
            StateSets::Row { enters, .. } => (inner + 1..=outer).contains(&(enters[position] as usize)),
            StateSets::Listed(sets) => sets[outer].contains(position) && !sets[inner].contains(position),
        };
        (0..self.order.len()).filter(is_between).map(|position| self.order[position]).collect()
    }

    /// Returns whether the states are nested, so that any two of them bound a stage.
    #[must_use]
    pub fn is_linear(&self) -> bool {
        matches!(self.sets, StateSets::Row { .. })
    }

    /// Returns for each position the first state that holds it, or `None` if the states are not nested.
    pub(crate) fn enters(&self) -> Option<&[u32]> {
        match &self.sets {
            StateSets::Row { enters, .. } => Some(enters),
            StateSets::Listed(_) => None,
        }
    }

    /// Returns the best single order: nested states from empty to full with the smallest sum of boundary bytes.
    ///
    /// State numbers differ from `self`. [`Cuts::Exact`] stays only if no cut is lost.
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

    /// Removes the states that hold some layers of a group in `together`, but not all.
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

    /// Keeps the states in `kept`, which must include the first and the last.
    fn only(self, kept: &[usize], cuts: Cuts) -> Self {
        // A layer enters at the first kept state that contains its old one.
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
            // Units describe steps between all states, so they no longer apply. Nothing asks for them after this.
            units: Vec::new(),
        }
    }

    /// Reduces a long chain of cuts to [`MAX_NESTED_CUTS`].
    ///
    /// The model is divided into that many parts of about equal time, bytes and layers, and each part keeps its cut
    /// with the fewest bytes across it.
    fn thinned(self, control: &Control) -> Result<Self> {
        let states = self.len();
        if !self.is_linear() || states <= MAX_NESTED_CUTS {
            return Ok(self);
        }
        let batch = self.batch_sizes - 1;
        let parts =
            |totals: &CutSums| [totals.forward_s + totals.backward_s, totals.parameter_bytes, totals.saved_bytes];
        let whole = parts(self.totals(states - 1, batch));
        // A layer counts by the mean of its shares of time, weights, activations and number. No single measure would
        // do: the time may be in a few layers and the memory in others.
        let part_of = |state: usize| {
            let shares = parts(self.totals(state, batch)).into_iter().zip(whole);
            let share: f64 = shares.map(|(part, whole)| if whole > 0.0 { part / whole } else { 0.0 }).sum();
            let share = (share + state as f64 / (states - 1) as f64)
                / (1 + whole.iter().filter(|&&whole| whole > 0.0).count()) as f64;
            // The first and the last state are always kept, and positions range over 0..=parts: hence 3 fewer.
            (share * (MAX_NESTED_CUTS - 3) as f64).floor()
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

/// Checks a graph, and returns the topological order of its layers and the readers of each layer's output.
fn checked(graph: &Graph) -> Result<(Vec<usize>, LayerReaders)> {
    graph.check()?;
    if graph.layers.is_empty() {
        return Err(Error::profile("the profile has no layers", "add at least one layer"));
    }
    let order = order::of(graph)?;
    let readers = LayerReaders::of(graph, &order);
    Ok((order, readers))
}

/// Lists every down-set that is a union of units, if they are at most `bound` or a chain of any length. Else `None`.
fn listed(units: &[LayerUnit], layers: usize, bound: usize, control: &Control) -> Result<Option<StateSets>> {
    // A chain of units needs no enumeration and no bound: its down-sets are its prefixes.
    if let Some(row) = walk::row(units, layers) {
        return Ok(Some(StateSets::row(&row, layers)));
    }
    Ok(walk::all(units, layers, bound, control)?.map(StateSets::listed))
}
