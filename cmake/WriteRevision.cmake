# cmake -DSOURCE_DIR=... -DOUTPUT=... -P WriteRevision.cmake: writes the source file that holds the git
# revision, and touches it only if the revision changed.
execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=*
  WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE revision ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT revision)
  set(revision unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
#include "src/bench/report/revision.h"

namespace sluice::bench {

const char* const kRevision = "@revision@";

}  // namespace sluice::bench
]] @ONLY)
