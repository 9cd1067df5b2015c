// The interactive picture, and what its parts share: `hpgo.draw.html` joins the files of this folder into one script.
// Columns arrive packed (base64 of deflated bytes of differences) and become typed arrays; a frame draws boxes while few
// are in view and shares of time otherwise, so its cost depends on pixels, not on actions.
"use strict";

const META = JSON.parse(document.getElementById("meta").textContent);
const { kinds, causes, marks, causeNames, kindNames, lines } = META;
const AXIS = 36, RIGHT = 14, HEAD = 24, PANEL_GAP = 12;
const CURVE_ROW_PX = 26; // a memory curve is readable from here on; the rows scroll where they no longer fit
const PAPER_PX = 720; // A4 and Letter, between their margins
const MOST_BOXES = 20000, MOST_ARROWS = 5000, OVERVIEW_CELLS = 2 ** 21;
const byId = (id) => document.getElementById(id);
const canvas = byId("canvas"), context = canvas.getContext("2d", { alpha: false }), tip = byId("tip");
const show = { ...META.show };
const view = { t0: 0, t1: META.end_s || 1, top: 0, rowPx: 20 };
let GUTTER = 60, guttered = 0; // wide enough for the rows' names
let width = 0, height = 0, ratio = 1, timelines = [], hover = null, dirty = false, dark = false;

// What the page's tests and the curious read.
const state = window.hpgo = { ready: false, modes: [], visible: 0, frame_ms: 0, hover: null, show, view, zoomTo, place, arrows: 0, kept, restore };

// Where on the canvas a rank and a time of a timeline are.
function place(number, rank, time_s) { return [xOf(time_s), panels()[number].top + rank * view.rowPx + strips().box / 2]; }
