//! The table of all families: what each is, where it comes from, its limits and its closed forms.
//!
//! Commands, documentation and tests read this one table. Formulas are given twice, as text for people and as functions
//! for tests; both hold for equal stages and free transfers.

use super::interleaved::Loop;
use super::one_f_one_b::{eager_windows, one_f_one_b, one_f_one_b_windows, overlapped};
use super::{LONGEST_S, Schedule, bidirectional, fill_drain, v_shape, wave, zb_greedy, zero_bubble};
use crate::error::{Error, Result};

/// Larger schedules are refused: 200 million actions are 4 GB.
pub const MOST_ACTIONS: u64 = 200_000_000;

/// What a schedule is asked for. Options that the family doesn't take must stay `None`.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
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
    /// How long actions take, for the families that look; `None` is one second for each of F, I and W.
    pub durations: Option<Durations>,
}

impl Request {
    /// `ranks` ranks, `micro_batches` micro-batches, all else as the family has it.
    #[must_use]
    pub const fn new(ranks: u32, micro_batches: u32) -> Self {
        Self { ranks, micro_batches, chunks: None, group_size: None, cap: None, windows: None, durations: None }
    }
}

/// Seconds of one micro-batch on each stage of a chain.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Durations {
    /// Forward of each stage.
    pub forward_s: Vec<f64>,
    /// Input gradient of each stage.
    pub input_gradient_s: Vec<f64>,
    /// Weight gradient of each stage.
    pub weight_gradient_s: Vec<f64>,
    /// From a stage to the next, or back.
    pub transfer_s: f64,
}

/// How many chunks a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunks {
    /// Always this many.
    Exactly(u32),
    /// Two unless asked for another number from two on.
    Several,
    /// Two unless asked for another even number.
    Even,
}

/// What ranks wait for beyond the data they exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Every iteration ends with a flush: gradients are synchronised once, weights have one version.
    Flush,
    /// No flush: weights are updated after every backward, and several versions of them are kept.
    Asynchronous,
    /// All ranks step together; a step takes as long as its slowest rank.
    LockStep,
}

/// A request's numbers, checked against a family's limits and filled with its defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Ranks, `p`.
    pub ranks: u32,
    /// Chunks a rank, `v`.
    pub chunks: u32,
    /// Micro-batches, `M`.
    pub micro_batches: u32,
    /// Micro-batches in a group, `g`.
    pub group_size: u32,
    /// Most activations a rank may hold.
    pub cap: u32,
}

/// Seconds of one micro-batch on any chunk, for the closed forms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Uniform {
    /// `F`.
    pub forward_s: f64,
    /// `I`.
    pub input_gradient_s: f64,
    /// `W`.
    pub weight_gradient_s: f64,
    /// `F‖B`.
    pub overlapped_s: f64,
}

impl Uniform {
    /// `B = I + W`.
    #[must_use]
    pub fn backward_s(&self) -> f64 {
        self.input_gradient_s + self.weight_gradient_s
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
    /// What it asks of the sizes; empty if nothing.
    pub limits: &'static str,
    /// Options of [`Request`] that it takes besides the sizes; others are refused, but durations are never wrong.
    pub options: &'static [&'static str],
    /// Chunks a rank.
    pub chunks: Chunks,
    /// Copies of the model: two where micro-batches flow both ways.
    pub chains: u32,
    /// Whether its backwards are `I` and `W`, at least in part.
    pub splits_backward: bool,
    /// What ranks wait for.
    pub pace: Pace,
    /// Versions of the weights that rank `r` keeps, as a formula. Copies of the model are counted by `chains`.
    pub weight_versions: &'static str,
    /// Most chunk activations that rank `r` holds, as a formula.
    pub peak: &'static str,
    /// Seconds from start to end that a rank is not busy, as a formula.
    pub bubble: &'static str,
    /// The same, from the most activations that the rank holds.
    versions_of: fn(u32) -> u32,
    peak_of: Option<fn(Sizes, u32) -> u32>,
    bubble_of: Option<fn(Sizes, Uniform) -> f64>,
    accepts: fn(Sizes) -> bool,
    build: fn(Sizes, &Request) -> Result<Schedule>,
}

/// What most families share.
const PLAIN: Family = Family {
    name: "",
    summary: "",
    source: "",
    limits: "",
    options: &[],
    chunks: Chunks::Exactly(1),
    chains: 1,
    splits_backward: false,
    pace: Pace::Flush,
    weight_versions: "1",
    versions_of: |_| 1,
    peak: "",
    bubble: "",
    peak_of: None,
    bubble_of: None,
    accepts: |_| true,
    build: |_, _| unreachable!("every row has its own"),
};

/// `(p - 1) (F + B)`, the bubble of every schedule that fills and drains once.
fn fill_and_drain(sizes: Sizes, uniform: Uniform) -> f64 {
    f64::from(sizes.ranks - 1) * (uniform.forward_s + uniform.backward_s())
}

/// Every family, simplest first.
pub const FAMILIES: &[Family] = &[
    Family {
        name: "sequential",
        summary: "one micro-batch after the other through all ranks, as without a pipeline",
        source: "the reference that pipelines are compared with; M = 1 on one rank is plain training",
        peak: "1",
        bubble: "(p - 1) M (F + B)",
        peak_of: Some(|_, _| 1),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.micro_batches) * fill_and_drain(sizes, uniform)),
        build: |sizes, _| {
            let windows = vec![1; sizes.ranks as usize];
            Ok(named("sequential", one_f_one_b(&windows, sizes.micro_batches)))
        },
        ..PLAIN
    },
    Family {
        name: "forward_only",
        summary: "forwards only, as in inference",
        source: "pipelined inference, for instance PipeEdge (Hu et al., 2022)",
        peak: "1",
        bubble: "(p - 1) F",
        peak_of: Some(|_, _| 1),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, _| Ok(fill_drain::forward_only("forward_only", sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "staggered",
        summary: "forwards in lock step: in step t, stage s works on micro-batch t - s",
        source: "systolic pipelines (Kung, 1982)",
        pace: Pace::LockStep,
        peak: "1",
        bubble: "(p - 1) F",
        peak_of: Some(|_, _| 1),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, _| Ok(fill_drain::forward_only("staggered", sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "gpipe",
        summary: "all forwards, then all backwards",
        source: "GPipe (Huang et al., 2019)",
        peak: "M",
        bubble: "(p - 1) (F + B)",
        peak_of: Some(|sizes, _| sizes.micro_batches),
        bubble_of: Some(fill_and_drain),
        build: |sizes, _| Ok(fill_drain::gpipe(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "1f1b",
        summary: "a warm-up of forwards, then a backward for each forward",
        source: "PipeDream-Flush (Narayanan et al., 2021); DAPPLE (Fan et al., 2021), policy PA",
        options: &["cap", "windows"],
        peak: "min(M, p - r, cap)",
        bubble: "(p - 1) (F + B)",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(sizes.ranks - rank).min(sizes.cap)),
        bubble_of: Some(fill_and_drain),
        build: |sizes, request| windowed(sizes, request, "1f1b", one_f_one_b_windows),
        ..PLAIN
    },
    Family {
        name: "eager_1f1b",
        summary: "1F1B with a warm-up nearly twice as long, which hides transfers",
        source: "DAPPLE (Fan et al., 2021), policy PB",
        options: &["cap", "windows"],
        peak: "min(M, 2 (p - r) - 1, cap)",
        bubble: "(p - 1) (F + B)",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(2 * (sizes.ranks - rank) - 1).min(sizes.cap)),
        bubble_of: Some(fill_and_drain),
        build: |sizes, request| windowed(sizes, request, "eager_1f1b", eager_windows),
        ..PLAIN
    },
    Family {
        name: "1f1b_overlap",
        summary: "1F1B whose steady state runs a forward and a backward as one, which hides expert exchange",
        source: "Megatron-LM, combined 1F1B; DeepSeek-V3 (2024) for the fused pair",
        peak: "min(M, 2 (p - r))",
        bubble: "(p - 1) (F + B) on the last rank",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(2 * (sizes.ranks - rank))),
        bubble_of: Some(fill_and_drain),
        build: |sizes, _| Ok(overlapped(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "pipedream",
        summary: "1F1B without a flush: a backward uses the weights of its own forward",
        source: "PipeDream (Narayanan et al., 2019)",
        options: &["windows"],
        pace: Pace::Asynchronous,
        weight_versions: "min(M, p - r)",
        versions_of: |in_flight| in_flight,
        peak: "min(M, p - r)",
        bubble: "0 in the steady state",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(sizes.ranks - rank)),
        build: |sizes, request| windowed(sizes, request, "pipedream", one_f_one_b_windows),
        ..PLAIN
    },
    Family {
        name: "pipedream_2bw",
        summary: "1F1B without a flush and with two versions of the weights",
        source: "PipeDream-2BW (Narayanan et al., 2021)",
        options: &["windows"],
        pace: Pace::Asynchronous,
        weight_versions: "2",
        versions_of: |_| 2,
        peak: "min(M, p - r)",
        bubble: "0 in the steady state",
        peak_of: Some(|sizes, rank| sizes.micro_batches.min(sizes.ranks - rank)),
        build: |sizes, request| windowed(sizes, request, "pipedream_2bw", one_f_one_b_windows),
        ..PLAIN
    },
    Family {
        name: "interleaved",
        summary: "1F1B over several chunks a rank, in groups of micro-batches",
        source: "Megatron-LM (Narayanan et al., 2021)",
        limits: GROUPS,
        options: &["chunks", "group_size"],
        chunks: Chunks::Several,
        peak: "min(v M, (v - 1) g + 2 (p - r - 1) + 1)",
        bubble: "(p - 1) (F + B) if g = p",
        peak_of: Some(|sizes, rank| {
            let Sizes { ranks: p, chunks: v, micro_batches: m, group_size: g, .. } = sizes;
            (v * m).min((v - 1) * g + 2 * (p - rank - 1) + 1)
        }),
        bubble_of: Some(fill_and_drain),
        build: |sizes, _| Ok(looped(sizes).interleaved()),
        ..PLAIN
    },
    Family {
        name: "interleaved_overlap",
        summary: "interleaved 1F1B whose steady state runs a forward and a backward as one",
        source: "Megatron-LM, combined 1F1B",
        limits: GROUPS,
        options: &["chunks", "group_size"],
        chunks: Chunks::Several,
        peak: "min(v M, (v - 1) g + 2 (p - r))",
        bubble: "(p - 1) (F + B) on the last rank if g = p",
        bubble_of: Some(fill_and_drain),
        peak_of: Some(|sizes, rank| {
            let Sizes { ranks: p, chunks: v, micro_batches: m, group_size: g, .. } = sizes;
            (v * m).min((v - 1) * g + 2 * (p - rank))
        }),
        build: |sizes, _| Ok(looped(sizes).interleaved_overlap()),
        ..PLAIN
    },
    Family {
        name: "looped_bfs",
        summary: "all forwards of a chunk before the next chunk's, backwards in reverse",
        source: "Breadth-first pipeline parallelism (Lamy-Poirier, 2023)",
        options: &["chunks"],
        chunks: Chunks::Several,
        peak: "v M",
        bubble: "(p - 1) (F + B) if M >= p",
        peak_of: Some(|sizes, _| sizes.chunks * sizes.micro_batches),
        bubble_of: Some(fill_and_drain),
        build: |sizes, _| Ok(fill_drain::looped_breadth_first(sizes.ranks, sizes.chunks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "hanayo",
        summary: "waves down and up the ranks, two chunks a rank for each wave",
        source: "Hanayo (Liu et al., 2023)",
        options: &["chunks", "cap"],
        chunks: Chunks::Even,
        peak: "at most v p, or cap",
        bubble: "about 1.4 (p - 1) (F + B) if M = p; a cap of 2 v p keeps it near that for more micro-batches",
        build: |sizes, request| {
            let Sizes { ranks, chunks, micro_batches, .. } = sizes;
            let under_way = request.cap.map_or(ranks, |cap| cap / chunks);
            if under_way == 0 {
                return Err(Error::argument(
                    format!("`cap` is {}, but a micro-batch on its way holds {chunks} chunks of a rank", sizes.cap),
                    format!("raise it to {chunks} or more"),
                ));
            }
            Ok(wave::hanayo(ranks, chunks, micro_batches, under_way))
        },
        ..PLAIN
    },
    Family {
        name: "zb_h1",
        summary: "1F1B whose weight gradients fill part of the bubble, with 1F1B's memory",
        source: "Zero bubble pipeline parallelism (Qi et al., 2023), ZB-H1",
        splits_backward: true,
        peak: "min(M, p)",
        bubble: "(p - 1) (F + I - W)",
        peak_of: Some(|sizes, _| sizes.micro_batches.min(sizes.ranks)),
        bubble_of: Some(|sizes, uniform| {
            f64::from(sizes.ranks - 1) * (uniform.forward_s + uniform.input_gradient_s - uniform.weight_gradient_s)
        }),
        build: |sizes, _| Ok(looped(sizes).zero_bubble("zb_h1")),
        ..PLAIN
    },
    Family {
        name: "zb_h2",
        summary: "split backwards and twice 1F1B's memory: no bubble inside a rank",
        source: "Zero bubble pipeline parallelism (Qi et al., 2023), ZB-H2",
        splits_backward: true,
        peak: "min(M, 2 p - 1)",
        bubble: "(p - 1) F if M >= p; none inside a rank if M >= 2 p - 1",
        peak_of: Some(|sizes, _| sizes.micro_batches.min(2 * sizes.ranks - 1)),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, _| Ok(zero_bubble::zb_h2(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "zb",
        summary: "weight gradients fill gaps greedily, under any cap and for stages of any durations",
        source: "Zero bubble pipeline parallelism (Qi et al., 2023), section 3.1",
        options: &["cap", "durations"],
        splits_backward: true,
        peak: "at most cap, 2 p if not given",
        bubble: "found by search; (p - 1) F with a cap of 2 p",
        build: |sizes, request| {
            let cap = request.cap.unwrap_or(2 * sizes.ranks);
            Ok(zb_greedy::zb(sizes.ranks, sizes.micro_batches, cap, &durations(sizes, request)?))
        },
        ..PLAIN
    },
    Family {
        name: "interleaved_zb",
        summary: "interleaved 1F1B with split backwards",
        source: "PyTorch, ScheduleInterleavedZeroBubble, after Qi et al. (2023)",
        limits: GROUPS,
        options: &["chunks", "group_size"],
        chunks: Chunks::Several,
        splits_backward: true,
        peak: "min(v M, (v - 1) g + p)",
        bubble: "(p - 1) F if g = p",
        peak_of: Some(|sizes, _| {
            let Sizes { ranks: p, chunks: v, micro_batches: m, group_size: g, .. } = sizes;
            (v * m).min((v - 1) * g + p)
        }),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, _| Ok(looped(sizes).zero_bubble("interleaved_zb")),
        ..PLAIN
    },
    Family {
        name: "zb_v",
        summary: "split backwards on a V: no bubble inside a rank, with 1F1B's memory",
        source: "Pipeline parallelism with controllable memory (Qi et al., 2024), ZB-V",
        options: &["durations"],
        chunks: Chunks::Exactly(2),
        splits_backward: true,
        peak: "min(2 M, 2 p)",
        bubble: "(p - 1) F",
        peak_of: Some(|sizes, _| 2 * sizes.micro_batches.min(sizes.ranks)),
        bubble_of: Some(|sizes, uniform| f64::from(sizes.ranks - 1) * uniform.forward_s),
        build: |sizes, request| match request.durations {
            None => Ok(v_shape::zb_v(sizes.ranks, sizes.micro_batches)),
            Some(_) => Ok(v_shape::zb_v_fitted(sizes.ranks, sizes.micro_batches, &durations(sizes, request)?)),
        },
        ..PLAIN
    },
    Family {
        name: "v_half",
        summary: "split backwards on a V with half of 1F1B's memory",
        source: "Pipeline parallelism with controllable memory (Qi et al., 2024), V-Half",
        options: &["durations"],
        chunks: Chunks::Exactly(2),
        splits_backward: true,
        peak: "at most 2 ⌊(p + 2) / 2⌋",
        bubble: "found by squeezing repeated blocks",
        build: |sizes, request| Ok(v_shape::v_half(sizes.ranks, sizes.micro_batches, &durations(sizes, request)?)),
        ..PLAIN
    },
    Family {
        name: "v_min",
        summary: "split backwards on a V with a third of 1F1B's memory",
        source: "Pipeline parallelism with controllable memory (Qi et al., 2024), V-Min",
        options: &["durations"],
        chunks: Chunks::Exactly(2),
        splits_backward: true,
        peak: "at most 2 ⌊(p + 4) / 3⌋",
        bubble: "found by squeezing repeated blocks",
        build: |sizes, request| Ok(v_shape::v_min(sizes.ranks, sizes.micro_batches, &durations(sizes, request)?)),
        ..PLAIN
    },
    Family {
        name: "dualpipe",
        summary: "micro-batches from both ends, forwards fused with the other direction's backwards",
        source: "DeepSeek-V3 (2024), DualPipe",
        limits: "p even, M even and at least 2 p",
        chains: 2,
        splits_backward: true,
        peak: "p + 1",
        bubble: "(p / 2 - 1) (F‖B + B - 3 W)",
        peak_of: Some(|sizes, _| sizes.ranks + 1),
        bubble_of: Some(|sizes, uniform| dual_bubble(sizes.ranks / 2 - 1, uniform)),
        accepts: |sizes| {
            let Sizes { ranks: p, micro_batches: m, .. } = sizes;
            p.is_multiple_of(2) && m.is_multiple_of(2) && m >= 2 * p
        },
        build: |sizes, _| Ok(bidirectional::dualpipe(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "dualpipe_v",
        summary: "DualPipe folded into a V: one copy of the weights",
        source: "DualPipeV, cut in half from DualPipe (Sea AI Lab, 2025)",
        limits: "M at least 2 p",
        chunks: Chunks::Exactly(2),
        splits_backward: true,
        peak: "2 p + 1",
        bubble: "(p - 1) (F‖B + B - 3 W)",
        peak_of: Some(|sizes, _| 2 * sizes.ranks + 1),
        bubble_of: Some(|sizes, uniform| dual_bubble(sizes.ranks - 1, uniform)),
        accepts: |sizes| sizes.micro_batches >= 2 * sizes.ranks,
        build: |sizes, _| Ok(bidirectional::dualpipe_v(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
    Family {
        name: "chimera",
        summary: "units of p micro-batches, half of them from either end",
        source: "Chimera (Li & Hoefler, 2021), direct concatenation",
        limits: "p even, M a multiple of p",
        chains: 2,
        peak: "min(p, p / 2 + 1 + the distance to the nearer end)",
        peak_of: Some(|sizes, rank| sizes.ranks.min(sizes.ranks / 2 + 1 + rank.min(sizes.ranks - 1 - rank))),
        bubble: "(p / 2 - 1) (F + B) if M = p and F = B",
        accepts: |sizes| sizes.ranks.is_multiple_of(2) && sizes.micro_batches.is_multiple_of(sizes.ranks),
        build: |sizes, _| Ok(bidirectional::chimera(sizes.ranks, sizes.micro_batches)),
        ..PLAIN
    },
];

const GROUPS: &str = "M a multiple of g, or a last group of at least p; g at least p or all of M";

/// `each (F‖B + B - 3 W)`.
fn dual_bubble(each: u32, uniform: Uniform) -> f64 {
    f64::from(each) * (uniform.overlapped_s + uniform.backward_s() - 3.0 * uniform.weight_gradient_s)
}

fn looped(sizes: Sizes) -> Loop {
    let Sizes { ranks, chunks, micro_batches, group_size, .. } = sizes;
    Loop { ranks, chunks, group_size, micro_batches }
}

fn named(name: &str, schedule: Schedule) -> Schedule {
    Schedule { name: name.to_owned(), ..schedule }
}

fn windowed(sizes: Sizes, request: &Request, name: &str, own: fn(u32, u32, u32) -> Vec<u32>) -> Result<Schedule> {
    let Some(windows) = &request.windows else {
        return Ok(named(name, one_f_one_b(&own(sizes.ranks, sizes.micro_batches, sizes.cap), sizes.micro_batches)));
    };
    if windows.len() != sizes.ranks as usize {
        return Err(Error::argument(
            format!("`windows` has {} entries for {} ranks", windows.len(), sizes.ranks),
            "give the number of warm-up forwards of each rank",
        ));
    }
    let windows: Vec<u32> = windows.iter().map(|&window| window.min(sizes.cap).min(sizes.micro_batches)).collect();
    if let Some(stage) = windows.iter().position(|&window| window == 0) {
        return Err(Error::argument(
            format!("`windows` of stage {stage} is 0"),
            "a stage holds at least one activation",
        ));
    }
    if let Some(stage) = windows.windows(2).position(|pair| pair[0] < pair[1]) {
        return Err(Error::argument(
            format!(
                "`windows` deadlocks: stage {} wants {} forwards before its first backward, stage {stage} gives it {}",
                stage + 1,
                windows[stage + 1],
                windows[stage]
            ),
            "let windows shrink from stage to stage",
        ));
    }
    Ok(named(name, one_f_one_b(&windows, sizes.micro_batches)))
}

/// The request's durations, or one second for each of F, I and W.
fn durations(sizes: Sizes, request: &Request) -> Result<Durations> {
    let stages = (sizes.ranks * sizes.chunks) as usize;
    let Some(durations) = &request.durations else {
        let one = vec![1.0; stages];
        return Ok(Durations {
            forward_s: one.clone(),
            input_gradient_s: one.clone(),
            weight_gradient_s: one,
            transfer_s: 0.0,
        });
    };
    let Durations { forward_s, input_gradient_s, weight_gradient_s, transfer_s } = durations;
    for (what, list) in [
        ("forward_s", forward_s),
        ("input_gradient_s", input_gradient_s),
        ("weight_gradient_s", weight_gradient_s),
        ("transfer_s", &vec![*transfer_s; stages]),
    ] {
        if list.len() != stages {
            return Err(Error::argument(
                format!("`{what}` has {} entries for {stages} stages", list.len()),
                "give one for each stage",
            ));
        }
        if let Some(time_s) = list.iter().find(|time_s| !(0.0..=LONGEST_S).contains(*time_s)) {
            return Err(Error::argument(
                format!("`{what}` holds {time_s:?}"),
                format!("times are numbers of seconds from 0 to {LONGEST_S:e}"),
            ));
        }
    }
    Ok(durations.clone())
}

impl Family {
    /// Checks `request` against the limits and fills in what it leaves open.
    ///
    /// # Errors
    /// [`Error::Argument`] if a number is 0, an option isn't this family's, a limit is broken, or the schedule would
    /// have more than [`MOST_ACTIONS`] actions.
    pub fn sizes(&self, request: &Request) -> Result<Sizes> {
        let name = self.name;
        self.check_options(request)?;
        let Request { ranks, micro_batches, .. } = *request;
        let chunks = match (self.chunks, request.chunks) {
            (Chunks::Exactly(chunks), None) => chunks,
            (Chunks::Several | Chunks::Even, None) => 2,
            (Chunks::Several, Some(chunks)) if chunks >= 2 => chunks,
            (Chunks::Even, Some(chunks)) if chunks.is_multiple_of(2) => chunks,
            (Chunks::Exactly(own), Some(chunks)) if own == chunks => chunks,
            (kind, Some(chunks)) => {
                let wanted = match kind {
                    Chunks::Exactly(own) => own.to_string(),
                    Chunks::Several => "2 or more".to_owned(),
                    Chunks::Even => "an even number of".to_owned(),
                };
                return Err(Error::argument(
                    format!("`{name}` was asked for {chunks} chunk(s) a rank but has {wanted}"),
                    "leave `chunks` out, or choose another schedule",
                ));
            }
        };
        let kinds = if self.splits_backward { 3 } else { 2 };
        let actions = [chunks, micro_batches, kinds].iter().try_fold(u64::from(ranks), |n, &k| n.checked_mul(k.into()));
        if actions.is_none_or(|actions| actions > MOST_ACTIONS) {
            let size = actions.map_or_else(|| "more than 10^19".to_owned(), |actions| actions.to_string());
            return Err(Error::argument(
                format!(
                    "`{name}` of {ranks} ranks, {chunks} chunk(s) and {micro_batches} micro-batches has {size} actions"
                ),
                format!("at most {MOST_ACTIONS} are allowed: ask for fewer micro-batches, chunks or ranks"),
            ));
        }
        let group_size = match request.group_size {
            None => smallest_group(ranks, micro_batches),
            Some(group) => group,
        };
        let sizes = Sizes { ranks, chunks, micro_batches, group_size, cap: request.cap.unwrap_or(u32::MAX) };
        let last_group = micro_batches % group_size;
        let groups = group_size >= ranks.min(micro_batches) && (last_group == 0 || last_group >= ranks);
        if !(self.accepts)(sizes) || (self.limits == GROUPS && !groups) {
            let group = if self.limits == GROUPS { format!(", g = {group_size}") } else { String::new() };
            return Err(Error::argument(
                format!("`{name}` can't have p = {ranks} ranks and M = {micro_batches} micro-batches{group}"),
                format!("it needs {}", self.limits),
            ));
        }
        Ok(sizes)
    }

    fn check_options(&self, request: &Request) -> Result<()> {
        let Self { name, options, .. } = self;
        let numbers = [
            ("ranks", Some(request.ranks)),
            ("micro_batches", Some(request.micro_batches)),
            ("chunks", request.chunks),
            ("group_size", request.group_size),
            ("cap", request.cap),
        ];
        if let Some((what, _)) = numbers.iter().find(|(_, number)| *number == Some(0)) {
            return Err(Error::argument(format!("`{what}` is 0"), "it must be at least 1"));
        }
        let given = [
            ("group_size", request.group_size.is_some()),
            ("cap", request.cap.is_some()),
            ("windows", request.windows.is_some()),
        ];
        match given.iter().find(|(option, given)| *given && !options.contains(option)) {
            Some((option, _)) => Err(Error::argument(
                format!("`{name}` has no option `{option}`"),
                if options.is_empty() { "leave it out".to_owned() } else { format!("it takes {}", options.join(", ")) },
            )),
            None => Ok(()),
        }
    }

    /// The schedule for `request`.
    ///
    /// # Errors
    /// As [`Family::sizes`].
    pub fn build(&self, request: &Request) -> Result<Schedule> {
        let schedule = (self.build)(self.sizes(request)?, request)?;
        if self.pace == Pace::Flush {
            return Ok(schedule);
        }
        let weight_versions = schedule.peak_in_flight().into_iter().map(self.versions_of).collect();
        Ok(Schedule { pace: self.pace, weight_versions, ..schedule })
    }

    /// Most chunk activations that `rank` holds, by the closed form; `None` if there is none.
    #[must_use]
    pub fn peak_in_flight(&self, sizes: Sizes, rank: u32) -> Option<u32> {
        self.peak_of.map(|peak| peak(sizes, rank))
    }

    /// Seconds that a rank is not busy from the first start to the last end, by the closed form for equal stages and
    /// free transfers; `None` if there is none.
    #[must_use]
    pub fn bubble_s(&self, sizes: Sizes, uniform: Uniform) -> Option<f64> {
        self.bubble_of.map(|bubble| bubble(sizes, uniform))
    }
}

/// The smallest group that divides `micro_batches` and keeps all ranks busy.
fn smallest_group(ranks: u32, micro_batches: u32) -> u32 {
    (ranks..=micro_batches).find(|&group| micro_batches.is_multiple_of(group)).unwrap_or(micro_batches)
}

/// The row called `name`.
///
/// # Errors
/// [`Error::Schedule`] if there is none; the hint names the nearest ones.
pub fn family(name: &str) -> Result<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
        let letters = |name: &str| name.to_lowercase().replace(['_', '-', ' '], "");
        let mut near: Vec<(usize, &str)> =
            FAMILIES.iter().map(|family| (edits(&letters(name), &letters(family.name)), family.name)).collect();
        near.sort_by_key(|&(edits, _)| edits);
        near.retain(|&(edits, _)| edits <= 3);
        let hint = match near.as_slice() {
            [] => "`hpgo schedules` lists them all".to_owned(),
            near => {
                let names: Vec<String> = near.iter().take(3).map(|(_, name)| format!("`{name}`")).collect();
                format!("did you mean {}? `hpgo schedules` lists them all", names.join(" or "))
            }
        };
        Error::schedule(format!("there is no schedule `{name}`"), hint)
    })
}

/// Letters to insert, delete or replace to get from one word to the other (Levenshtein, 1966).
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.chars().count()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.chars().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[row.len() - 1]
}

/// The schedule of family `name` for `request`.
///
/// ```
/// use hpgo::schedule::{Request, build};
///
/// let schedule = build("interleaved", &Request { chunks: Some(3), ..Request::new(4, 8) })?;
/// assert_eq!(schedule.stages(), 12);
/// assert_eq!(build("dualpipe", &Request::new(4, 6)).unwrap_err().hint(), "it needs p even, M even and at least 2 p");
/// # Ok::<(), hpgo::Error>(())
/// ```
///
/// # Errors
/// [`Error::Schedule`] if there is no such family, [`Error::Argument`] if the request is outside its limits.
pub fn build(name: &str, request: &Request) -> Result<Schedule> {
    family(name)?.build(request)
}
