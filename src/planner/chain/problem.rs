//! The partition problem: layers, hosts of several types, and links between them, as plain values.

use crate::error::{Error, Result};

/// A group of equal hosts: equal times, memory, links and permissions.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct HostType {
    /// Name for error messages.
    pub name: String,
    /// Number of hosts of this type.
    pub hosts: usize,
    /// Memory of each host, in bytes. A stage must need less.
    pub memory_bytes: f64,
    /// Seconds that each layer takes for one batch.
    pub time_s: Vec<f64>,
    /// Whether each layer may run on these hosts. Empty if all layers may.
    pub may_run: Vec<bool>,
}

impl HostType {
    /// Creates a type whose hosts may run every layer.
    #[must_use]
    pub fn new(name: &str, hosts: usize, memory_bytes: f64, time_s: Vec<f64>) -> Self {
        Self { name: name.to_owned(), hosts, memory_bytes, time_s, may_run: Vec::new() }
    }
}

/// A link in one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Hop {
    /// Bytes per second. 0 if there is no link.
    pub bytes_per_s: f64,
    /// Seconds that a message of zero bytes takes.
    pub latency_s: f64,
}

impl Hop {
    /// A link on which messages take no time.
    pub const FREE: Self = Self { bytes_per_s: f64::INFINITY, latency_s: 0.0 };

    /// Returns the seconds that `bytes` take.
    pub(super) fn seconds(self, bytes: f64) -> f64 {
        // Without this case, nothing to send over no link would be 0/0, which is NaN.
        if bytes == 0.0 { self.latency_s } else { bytes / self.bytes_per_s + self.latency_s }
    }
}

/// Objective of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    /// Shortest interval between batches. Among plans with that interval, one with few hosts.
    Throughput,
    /// Shortest time of one batch through the empty pipeline.
    Latency,
    /// Smallest number of hosts.
    Hosts,
    /// Fewest bits removed from the values on the edges, summed over the edges.
    Bits,
}

/// A partition problem: layers, and the hosts that may run them.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Chain {
    /// Bytes of weights of each layer.
    pub layer_bytes: Vec<f64>,
    /// Names of layers for error messages. Empty if numbers from 1 are enough.
    pub names: Vec<String>,
    /// Layers before each position, in ascending order. Positions come after their subsets, the first is
    /// empty and the last is full. Empty for a chain, where position `p` has the first `p` layers before it.
    pub inside: Vec<Vec<usize>>,
    /// A line of nested positions from the first to the last, which is searched first. Empty if all positions are
    /// nested.
    pub row: Vec<usize>,
    /// Whether the model has other cuts than these positions. Then bounds and proofs hold for those cuts as well.
    pub is_restricted: bool,
    /// Bytes that cross each position for one batch: the input, then the output of each layer.
    pub cut_bytes: Vec<f64>,
    /// Number of received batches that wait, besides the one being processed.
    pub buffers_in: u32,
    /// Number of finished batches that wait, besides the one being processed.
    pub buffers_out: u32,
    /// Groups of equal hosts.
    pub types: Vec<HostType>,
    /// Link from a host of one type to a host of another, as `links[from][to]`.
    pub links: Vec<Vec<Hop>>,
    /// Link from the source of the input to a host of each type. Empty if that takes no time.
    pub input: Vec<Hop>,
    /// Link from a host of each type to the destination of the result. Empty if that takes no time.
    pub output: Vec<Hop>,
    /// Maximum number of hosts that share a stage.
    pub max_replicas: usize,
    /// Bits per value that an edge may use, in descending order. `cut_bytes` is for the first of them.
    pub bits: Vec<u32>,
}

impl Chain {
    /// Creates a problem with free links, without buffers, and with one host per stage. Change the fields for other
    /// problems.
    #[must_use]
    pub fn new(layer_bytes: Vec<f64>, cut_bytes: Vec<f64>, types: Vec<HostType>) -> Self {
        let links = vec![vec![Hop::FREE; types.len()]; types.len()];
        Self {
            layer_bytes,
            names: Vec::new(),
            inside: Vec::new(),
            row: Vec::new(),
            is_restricted: false,
            cut_bytes,
            buffers_in: 0,
            buffers_out: 0,
            types,
            links,
            input: Vec::new(),
            output: Vec::new(),
            max_replicas: 1,
            bits: vec![32],
        }
    }

    /// Returns whether all positions are nested, so that any two of them bound a stage.
    pub(super) fn is_row(&self) -> bool {
        self.row.is_empty()
    }

    /// Returns the name of a layer for error messages.
    pub(super) fn name(&self, layer: usize) -> String {
        match self.names.get(layer) {
            Some(name) => format!("layer `{name}`"),
            None => format!("layer {}", layer + 1),
        }
    }

    /// Returns the same problem with the positions of `row` only.
    pub(super) fn along_row(&self) -> Self {
        Self {
            inside: self.row.iter().map(|&position| self.inside[position].clone()).collect(),
            row: Vec::new(),
            is_restricted: true,
            cut_bytes: self.row.iter().map(|&position| self.cut_bytes[position]).collect(),
            ..self.clone()
        }
    }

    /// Checks the problem for contradictions, before any search.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] that names the value and the rule that it breaks.
    pub(super) fn check(&self, objective: Objective, max_interval_s: Option<f64>) -> Result<()> {
        let layers = self.layer_bytes.len();
        let size = |what: &str, found: usize, wanted: usize| {
            if found == wanted {
                return Ok(());
            }
            Err(Error::argument(
                format!("{what} has {found} entries where {wanted} are needed"),
                format!("there are {layers} layers and {} host types", self.types.len()),
            ))
        };
        // Finite limits keep all sums finite. A typing error in a unit usually exceeds them, hence the hint.
        let number = |what: &dyn Fn() -> String, value: f64, max: f64| {
            if value >= 0.0 && value <= max {
                return Ok(());
            }
            let rule = if value > max { format!("at most {max:e}") } else { "0 or more".into() };
            Err(Error::argument(format!("{} is {value}, but it must be {rule}", what()), "check the unit"))
        };
        if layers == 0 || layers > 1_000_000 {
            return Err(Error::argument(
                format!("the chain has {layers} layers, but it must have 1 to 1,000,000"),
                "split or join layers",
            ));
        }
        if self.inside.is_empty() {
            size("cut_bytes", self.cut_bytes.len(), layers + 1)?;
        } else {
            size("cut_bytes", self.cut_bytes.len(), self.inside.len())?;
            // Searches rely on sorted layers, and on a first and last position without and with all layers.
            let is_set = |inside: &Vec<usize>| inside.is_sorted_by(|one, two| one < two);
            let ends = [self.inside[0].len(), self.inside[self.inside.len() - 1].len()];
            let is_known = |inside: &Vec<usize>| inside.last().is_none_or(|&layer| layer < layers);
            let in_row = |&position: &usize| position < self.inside.len();
            let row_ends = [self.row.first(), self.row.last()];
            if !self.inside.iter().all(|inside| is_set(inside) && is_known(inside))
                || ends != [0, layers]
                || !self.row.iter().all(in_row)
                || !(self.row.is_empty() || row_ends == [Some(&0), Some(&(self.inside.len() - 1))])
            {
                return Err(Error::argument(
                    "the positions are not cuts of the layers",
                    "list sorted layers for each position, from none to all",
                ));
            }
        }
        size("links", self.links.len(), self.types.len())?;
        if !self.names.is_empty() {
            size("names", self.names.len(), layers)?;
        }
        for (layer, &bytes) in self.layer_bytes.iter().enumerate() {
            number(&|| format!("memory of {}", self.name(layer)), bytes, MAX_BYTES)?;
        }
        for (position, &bytes) in self.cut_bytes.iter().enumerate() {
            number(&|| format!("bytes behind layer {position}"), bytes, MAX_BYTES)?;
        }
        for (host, row) in self.types.iter().zip(&self.links) {
            let name = &host.name;
            size(&format!("time_s of `{name}`"), host.time_s.len(), layers)?;
            size(&format!("links of `{name}`"), row.len(), self.types.len())?;
            if !host.may_run.is_empty() {
                size(&format!("may_run of `{name}`"), host.may_run.len(), layers)?;
            }
            number(&|| format!("memory of `{name}`"), host.memory_bytes, f64::INFINITY)?;
            for (layer, &seconds) in host.time_s.iter().enumerate() {
                number(&|| format!("time of {} on `{name}`", self.name(layer)), seconds, 1e15)?;
            }
        }
        for ends in [&self.input, &self.output] {
            if !ends.is_empty() {
                size("input or output", ends.len(), self.types.len())?;
            }
        }
        for hop in self.links.iter().flatten().chain(&self.input).chain(&self.output) {
            number(&|| "the rate of a link".into(), hop.bytes_per_s, f64::INFINITY)?;
            number(&|| "the latency of a link".into(), hop.latency_s, 1e15)?;
        }
        if self.max_replicas == 0 {
            return Err(Error::argument("max_replicas is 0, but a stage needs a host", "set it to 1 or more"));
        }
        if self.bits.is_empty() || self.bits.contains(&0) || !self.bits.is_sorted_by(|more, less| more > less) {
            return Err(Error::argument(
                format!("bits are {:?}", self.bits),
                "list the full width first, then smaller widths in descending order, none of them 0",
            ));
        }
        // Without that objective the full width is always allowed, so further widths would be ignored silently.
        if self.bits.len() > 1 && objective != Objective::Bits {
            return Err(Error::argument(
                "several bit widths are allowed, but only the objective `bits` chooses among them",
                "set the objective `bits` with a throughput, or allow one width",
            ));
        }
        match max_interval_s {
            // A limit of 0 is valid: layers and links may take no time.
            Some(limit) if limit.is_nan() || limit < 0.0 => {
                Err(Error::argument(format!("the maximum interval is {limit} s, not 0 or more"), "set it to 0 or more"))
            }
            None if objective == Objective::Bits => Err(Error::argument(
                "the objective `bits` needs a throughput: without one, no bits have to be removed",
                "set a throughput",
            )),
            _ => Ok(()),
        }
    }
}

/// Largest number of bytes that is accepted: a zettabyte, more than any memory.
const MAX_BYTES: f64 = 1e21;
