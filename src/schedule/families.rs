//! The table of all families: name, what it is, where it comes from, its limits and its closed forms.
//!
//! Commands, documentation and tests read this one table.

use super::one_f_one_b::{eager_windows, one_f_one_b, one_f_one_b_windows};
use super::{Schedule, fill_drain};
use crate::error::{Error, Result};

/// Larger schedules are refused: 200 million actions are 4 GB.
pub const MOST_ACTIONS: u64 = 200_000_000;

/// What a schedule is asked for. Fields that a family doesn't know stay `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Number of ranks, `p`.
    pub ranks: u32,
    /// Number of micro-batches over all chains, `M`.
    pub micro_batches: u32,
    /// Chunks a rank, `v`; `None` is the family's own number.
    pub chunks: Option<u32>,
    /// Micro-batches that pass through a chunk before the next chunk's turn, `g`.
    pub group_size: Option<u32>,
    /// Most activations a rank may hold, in chunks.
    pub cap: Option<u32>,
    /// Warm-up forwards of each stage, in place of the family's own.
    pub windows: Option<Vec<u32>>,
}

impl Request {
    /// `ranks` ranks, `micro_batches` micro-batches, all else as the family has it.
    #[must_use]
    pub const fn new(ranks: u32, micro_batches: u32) -> Self {
        Self { ranks, micro_batches, chunks: None, group_size: None, cap: None, windows: None }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// The field's name for it.
    pub name: &'static str,
    /// What it is, in one line.
    pub summary: &'static str,
    /// Where it was published.
    pub source: &'static str,
    build: fn(&Request) -> Result<Schedule>,
}

/// Every family, simplest first.
pub const FAMILIES: &[Family] = &[
    Family {
        name: "gpipe",
        summary: "all forwards, then all backwards",
        source: "GPipe (Huang et al., 2019)",
        build: |request| Ok(fill_drain::gpipe(request.ranks, request.micro_batches)),
    },
    Family {
        name: "forward_only",
        summary: "forwards only, as in inference",
        source: "GPipe (Huang et al., 2019)",
        build: |request| Ok(fill_drain::forward_only(request.ranks, request.micro_batches)),
    },
    Family {
        name: "1f1b",
        summary: "a warm-up of forwards, then one backward for each forward",
        source: "PipeDream-Flush (Narayanan et al., 2021); DAPPLE (Fan et al., 2021), policy PA",
        build: |request| windowed(request, "1f1b", one_f_one_b_windows),
    },
    Family {
        name: "eager_1f1b",
        summary: "1F1B with a warm-up about twice as long, which hides transfers",
        source: "DAPPLE (Fan et al., 2021), policy PB",
        build: |request| windowed(request, "eager_1f1b", eager_windows),
    },
];

fn windowed(request: &Request, name: &str, default: fn(u32, u32, u32) -> Vec<u32>) -> Result<Schedule> {
    let windows = match &request.windows {
        Some(windows) if windows.len() != request.ranks as usize => {
            return Err(Error::argument(
                format!("`windows` has {} entries for {} ranks", windows.len(), request.ranks),
                "give one number of warm-up forwards for each rank",
            ));
        }
        Some(windows) => windows.clone(),
        None => default(request.ranks, request.micro_batches, request.cap.unwrap_or(u32::MAX)),
    };
    Ok(Schedule { name: name.to_owned(), ..one_f_one_b(&windows, request.micro_batches) })
}

/// The row called `name`.
///
/// # Errors
/// [`Error::Schedule`] if there is none.
pub fn family(name: &str) -> Result<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        Error::schedule(format!("there is no schedule `{name}`"), format!("choose one of {}", names.join(", ")))
    })
}

/// The schedule of family `name` for `request`.
///
/// # Errors
/// [`Error::Schedule`] if there is no such family, [`Error::Argument`] if the request is outside its limits or larger
/// than [`MOST_ACTIONS`].
pub fn build(name: &str, request: &Request) -> Result<Schedule> {
    let family = family(name)?;
    for (what, number) in [("ranks", request.ranks), ("micro_batches", request.micro_batches)] {
        if number == 0 {
            return Err(Error::argument(format!("`{what}` is 0"), "a schedule needs at least 1"));
        }
    }
    let actions =
        u64::from(request.ranks) * u64::from(request.chunks.unwrap_or(1)) * u64::from(request.micro_batches) * 2;
    if actions > MOST_ACTIONS {
        return Err(Error::argument(
            format!("`{name}` with these numbers has {actions} actions, more than {MOST_ACTIONS}"),
            "lower the number of ranks, chunks or micro-batches",
        ));
    }
    (family.build)(request)
}
