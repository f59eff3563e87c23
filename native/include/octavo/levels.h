// The operators of every level, and the one level in use.
//
// Each family of operators has a table of function pointers (octavo/<family>.h); every level defines one of each. To
// add a family: a header with its table, ops/<family>.cpp that defines `const XTable x_table`, and three lines below.
#pragma once
#include "octavo/attention.h"
#include "octavo/gather.h"
#include "octavo/linear.h"
#include "octavo/norms.h"
#include "octavo/pointwise.h"
#include "octavo/probe.h"
#include "octavo/qlinear.h"
#include "octavo/rotary.h"
#include "octavo/sampling.h"

namespace octavo {

struct Level {
  const char* name;
  const NormsTable* norms;
  const LinearTable* linear;
  const QLinearTable* qlinear;
  const AttentionTable* attention;
  const PointwiseTable* pointwise;
  const RotaryTable* rotary;
  const GatherTable* gather;
  const SamplingTable* sampling;
  const ProbeTable* probe;
};

// The families of a level. Used in core/levels.cpp, for declaring what ops/*.cpp define.
#define OCTAVO_DECLARE_TABLES(level)          \
  namespace level {                           \
  extern const NormsTable norms_table;        \
  extern const LinearTable linear_table;      \
  extern const QLinearTable qlinear_table;    \
  extern const AttentionTable attention_table;\
  extern const PointwiseTable pointwise_table;\
  extern const RotaryTable rotary_table;      \
  extern const GatherTable gather_table;      \
  extern const SamplingTable sampling_table;  \
  extern const ProbeTable probe_table;        \
  }
#define OCTAVO_TABLES(level) &level::norms_table, &level::linear_table, &level::qlinear_table, &level::attention_table, \
  &level::pointwise_table, &level::rotary_table, &level::gather_table, &level::sampling_table, &level::probe_table

// Levels that this processor and system can run, the best last.
int num_levels();
const Level& level(int index);
// The level in use; the best one until `use_level` names another. Never changed while operators run.
const Level& current_level();
// False when this machine cannot run a level of that name.
bool use_level(const char* name);
// Each thread that touches AMX tiles asks the system once a process; true when granted.
bool request_tiles();

}  // namespace octavo
